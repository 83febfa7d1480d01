"""The section `[precision]`: the mode and its formats; see docs/reference/precision.md. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticKnownError

from megatron_rl.config.base import ConfigSection
from parallel.formats import MODES


class PrecisionConfig(ConfigSection):
    """The precision flow of trainer and engine. See docs/reference/precision.md."""

    mode: str = "fp8_unified"
    """`fp8_unified`: trainer and engine compute with the same FP8 blocks (Jet-RL). `fp8_rollout`, `int8_rollout` (FlashRL): the trainer
    computes in `high`, the engine with weights quantised at each sync. `bf16`: both in `high`."""
    scale_format: Literal["pow2", "fp32"] = "pow2"
    """Scales of FP8 blocks; a format with scales of its own keeps them. `pow2` is exact on both sides."""
    backend: Literal["emulated", "transformer_engine", "deep_gemm"] = "emulated"
    """Who computes the trainer's quantized products. `emulated` runs on any device and is the reference."""
    high: Literal["bf16", "fp32"] = "bf16"
    """The dtype of everything that is not quantized, the same on both sides. `fp32` is the faster one on a CPU."""
    reduction: Literal["tree", "fast"] = "tree"
    """Order of a row-parallel layer's sums. `tree`: a fixed one, the same bits for every tp of trainer and engine. `fast`: that of the
    library and of the number of ranks."""
    kv: Literal["high", "e4m3", "e4m3_per_layer"] = "high"
    """Keys and values in the engine's cache, and as the trainer's attention reads them. `e4m3`: a byte each, with a power-of-two scale per
    token and head; CPU only. `e4m3_per_layer`: one scale for a layer's keys and one for its values, chosen anew for each policy version.
    Modes that quantize the engine alone keep the trainer's in `high`."""
    masters: Literal["spread", "stored"] = "spread"
    """Where FP32 masters begin that are finer than the policy's copy of the weight. `spread`: drawn, by `train.seed` and place, from the
    values that the checkpoint's number stands for, so that the copy follows from the first step. `stored`: the number itself."""

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, mode: str) -> str:
        if mode not in MODES:
            *names, last = map(repr, MODES)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
        return mode
