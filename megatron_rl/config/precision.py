"""The `[precision]` section. See docs/reference/precision.md."""

from typing import Annotated, Literal

from pydantic import field_validator
from pydantic_core import PydanticKnownError

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.change import NAMED, NEVER, Change
from parallel.formats import MODES

_IN_CHECKPOINT = Change(NEVER, "The tensors in the checkpoint and the reference depend on it.")


class PrecisionConfig(ConfigSection):
    """Numeric formats of the trainer and the engine."""

    on_resume = Change(NAMED, "Trainer and engine round differently.")

    mode: Annotated[str, _IN_CHECKPOINT] = "fp8_unified"
    """`fp8_unified`: the trainer and the engine compute with the same FP8 blocks (Jet-RL). `fp8_rollout`, `int8_rollout` (FlashRL): the
    trainer computes in `high`, and the engine's weights are quantized at each sync. `bf16`: both compute in `high`."""
    scale_format: Literal["pow2", "fp32"] = "pow2"
    """Format of FP8 block scales: powers of two, which are applied exactly, or any FP32 number. Other formats have their own scales."""
    backend: Literal["emulated", "transformer_engine", "deep_gemm"] = "emulated"
    """Library for the trainer's quantized matrix products. `emulated` runs on any device and is the reference."""
    high: Annotated[Literal["bf16", "fp32"], _IN_CHECKPOINT] = "bf16"
    """Dtype of everything that is not quantized, in the trainer and the engine. `fp32` is faster on a CPU."""
    reduction: Literal["tree", "ranks", "fast"] = "tree"
    """Summation order of row-parallel layers. `tree`: a fixed order, bitwise identical for every tensor-parallel size of the trainer and
    the engine. `ranks`: the partial results of max(trainer's tp, engine's tp) parts, added in the order of ranks. `ranks` is for GPUs and
    dense models and requires one kernel per operator in trainer and engine. `fast`: the order that the library and the number of ranks
    imply."""
    kv: Annotated[Literal["high", "e4m3", "e4m3_per_layer"], _IN_CHECKPOINT] = "high"
    """Format of keys and values in the engine's cache and in the trainer's attention. `e4m3`: one byte each, with a power-of-two scale per
    token and head; CPU only. `e4m3_per_layer`: one scale for the keys and one for the values of a layer, updated with each policy
    version. Modes that only quantize the engine keep the trainer's keys and values in `high`."""
    masters: Annotated[Literal["spread", "stored"], _IN_CHECKPOINT] = "spread"
    """Initial FP32 master weights if they are finer than the policy's weight format. `spread`: drawn from the values that round to the
    checkpoint's number, by `train.seed` and position, so that weights change from the first step on. `stored`: the number itself."""

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, mode: str) -> str:
        if mode not in MODES:
            *names, last = map(repr, MODES)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names)} or {last}"})
        return mode
