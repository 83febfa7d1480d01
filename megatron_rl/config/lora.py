"""The section `[lora]`: adapters that train in the place of the policy's weights. Imports without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from megatron_rl.config.base import ConfigSection
from parallel.adapters import AdapterGeometry
from parallel.model_geometry import ModelGeometry

Target = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class LoraConfig(ConfigSection):
    """y = W x + alpha / rank * B (A x): A and B train, W and all other weights stay as the checkpoint has them. Adapters are in
    `precision.high`, and there is no dropout: the engine would sample from another policy. See docs/guides/lora.md."""

    rank: int = Field(16, ge=8, multiple_of=8)
    """Rows of A, columns of B."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's product is weighed by alpha / rank."""
    targets: tuple[Target, ...] = Field(("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), min_length=1)
    """Megatron's layers that have an adapter. In PEFT `linear_qkv` is q_proj, k_proj and v_proj, `linear_proj` o_proj,
    `linear_fc1` gate_proj and up_proj, `linear_fc2` down_proj; those of every expert, and of shared ones, too."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapt(self, model: ModelGeometry) -> ModelGeometry:
        """Return the model with these adapters."""
        return replace(model, adapters=AdapterGeometry(self.rank, self.targets))
