"""The precision contract: which tensors are quantized in which format, and what stays in high precision.

Trainer, engine settings, converter, checkpoint and precision graph all read this file; none keeps a list of its own. No torch here.

The three products of a linear layer y = x W^T in unified FP8 (Jet-RL, arXiv 2601.14243):

    FProp   y  = Q_1x128(x)    . Q_128x128(W)^T  -> high precision
    DGrad   dx = Q_1x128(dy)   . Q_128x128(W)    -> high precision     (the same weight blocks as FProp)
    WGrad   dW = Q_1x128(dy^T) . Q_128x1(x)      -> FP32, accumulated

Weights are quantized once per optimizer step from the FP32 master; the same blocks serve FProp, DGrad and the engine.

In `fp8_rollout` and `int8_rollout` (FlashRL) the trainer computes in high precision and quantizes its weights at every sync; only
the engine computes y = Q_1x128(x) . Q_128x128(W)^T, or in INT8 with a scale per token and per output channel (`precision.int8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config import PrecisionConfig
from parallel.formats import FORMATS, FP32, MODES, TensorFormat
from parallel.shards import FP32_ROLES

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""

AMAX_EPSILON = 1e-10
"""Smallest block maximum, as SGLang clamps it; with it a pow2 block of zeros has scale 2^-42 on both sides."""

QUANTIZED_ROLES = frozenset({"attention_qkv", "attention_output", "mlp_in", "mlp_out"})
"""Roles of weights (`parallel.model_geometry`) that a mode quantizes (`parallel.formats.MODES`); all others stay in high precision."""


@dataclass(frozen=True)
class PrecisionContract:
    """The contract of one run's configuration."""

    mode: str
    scale_format: str
    high: str
    backend: str = "emulated"
    """Library that computes the trainer's products; every backend keeps the contract."""
    reduction: str = "tree"
    """Order of row-parallel sums: "tree" (`kernels.sums.reference`) or "fast"."""
    kv: str = "high"
    """Keys and values in the engine's cache: "high", "e4m3" or "e4m3_per_layer" (`precision.kv_cache`)."""

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> PrecisionContract:
        return cls(precision.mode, precision.scale_format, precision.high, precision.backend, precision.reduction, precision.kv)

    @property
    def sums_by_tree(self) -> bool:
        """Whether row-parallel layers of trainer and engine sum by the tree; INT8 ones, whose ranks each quantize their part of a token,
        have no sum that is independent of them."""
        return self.reduction == "tree" and (not self.engine_format.block or self.engine_format.block[1] > 0)

    @property
    def trainer_quantizes_kv(self) -> bool:
        """Whether the trainer's attention reads keys and values as the engine's does: in modes that compute alike on both sides."""
        return self.kv != "high" and self.trainer_format == self.engine_format

    @property
    def engine_alone_quantizes_kv(self) -> bool:
        return self.kv != "high" and not self.trainer_quantizes_kv

    @property
    def scales_kv_by_layer(self) -> bool:
        """Whether the model has a scale for each layer's keys and one for its values (`ModelGeometry.kv_scales`)."""
        return self.kv == "e4m3_per_layer"

    def count_kv_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's keys, or values, of a token in the engine's cache; with a scale per token it is beside them."""
        return self.high_format.count_bytes((1, head_dim)) if self.kv == "high" else head_dim + (not self.scales_kv_by_layer)

    @property
    def high_format(self) -> TensorFormat:
        """What is not quantized has this format, on both sides."""
        return FORMATS[self.high]

    @cached_property
    def engine_format(self) -> TensorFormat:
        """The format of the quantized roles in the engine; `high_format` where nothing is quantized."""
        return (MODES[self.mode].engine or self.high_format).with_scales(self.scale_format)

    @cached_property
    def trainer_format(self) -> TensorFormat:
        """The format that the trainer's layers of the quantized roles compute with."""
        return (MODES[self.mode].trainer or self.high_format).with_scales(self.scale_format)

    def trainer_format_of(self, role: str) -> TensorFormat:
        """Return the format that the trainer computes with for a role's weights; a quantized one's master is FP32."""
        return self.trainer_format if role in QUANTIZED_ROLES else self.format_of(role)

    def spreads_parameter(self, role: str) -> bool:
        """Return whether a role's parameter is itself an FP32 master that is coarser in the policy: where `precision.masters` spreads it as
        it is read. A BF16 parameter has its master in the optimizer."""
        return self.format_of(role).quantized and (self.trainer_format.quantized or self.high == FP32.name)

    def format_of(self, role: str) -> TensorFormat:
        """Return the format of a role's weights in the engine, on the way there, and in an export."""
        if role in FP32_ROLES:
            return FP32
        return self.engine_format if role in QUANTIZED_ROLES else self.high_format
