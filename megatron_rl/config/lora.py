"""The `[lora]` section. See docs/guides/lora.md."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from megatron_rl.config.base import MAX_RANKS, ConfigSection
from megatron_rl.config.change import NEVER, Change
from parallel.adapters import AdapterGeometry
from parallel.model_geometry import ModelGeometry


class LoraConfig(ConfigSection):
    """LoRA adapters: y = W x + alpha / rank * B (A x). Only A and B are trained; W and all other weights stay frozen. Adapters have the
    dtype `precision.high`. There is no dropout, because the engine could not reproduce it."""

    on_resume = Change(NEVER, "The adapters in the checkpoint have this shape and scale.")

    rank: int = Field(16, ge=8, multiple_of=8, le=MAX_RANKS)
    """Number of rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """Numerator of the adapter scale, alpha / rank."""
    targets: tuple[Literal["linear_qkv", "linear_proj", "in_proj_qkvz", "out_proj", "linear_fc1", "linear_fc2"], ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), min_length=1
    )
    """Megatron layers that get an adapter, including those of experts and shared experts. PEFT's names: `linear_qkv` is q_proj, k_proj and
    v_proj; `linear_proj` is o_proj; `linear_fc1` is gate_proj and up_proj; `linear_fc2` is down_proj. Gated delta nets have `in_proj_qkvz`,
    which is in_proj_qkv and in_proj_z in Qwen3.5, and `out_proj`."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapt(self, model: ModelGeometry) -> ModelGeometry:
        """Return `model` with these adapters."""
        return replace(model, adapters=AdapterGeometry(self.rank, self.targets))
