"""The precision contract: which tensors are quantized, in which format, and which stay in high precision.

Trainer, engine settings, converter, checkpoint and precision graph all use this module, which does not import torch.

The three products of a linear layer y = x W^T in unified FP8 (Jet-RL, arXiv 2601.14243):

    FProp   y  = Q_1x128(x)    . Q_128x128(W)^T  -> high precision
    DGrad   dx = Q_1x128(dy)   . Q_128x128(W)    -> high precision     (the same weight blocks as FProp)
    WGrad   dW = Q_1x128(dy^T) . Q_128x1(x)      -> FP32, accumulated

Weights are quantized once per optimizer step from the FP32 master; the same blocks serve FProp, DGrad and the engine.

In `fp8_rollout` and `int8_rollout` (FlashRL), the trainer computes in high precision and quantizes its weights at every sync. Only the
engine computes y = Q_1x128(x) . Q_128x128(W)^T, or in INT8 with a scale per token and per output channel (`precision.int8`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_rl.config import PrecisionConfig
from parallel.formats import FORMATS, FP32, MODES, TensorFormat
from parallel.shards import FP32_ROLES

E4M3_MAX = 448.0  # largest finite E4M3 value

AMAX_EPSILON = 1e-10  # smallest block maximum, as in SGLang; a pow2 block of zeros has scale 2^-42 on both sides

QUANTIZED_ROLES = frozenset({"attention_qkv", "attention_output", "mlp_in", "mlp_out"})
"""Roles of weights (`parallel.model_geometry`) that modes quantize (`parallel.formats.MODES`); others stay in high precision."""


@dataclass(frozen=True)
class PrecisionContract:
    """The precision contract of a run."""

    mode: str
    scale_format: str
    high: str
    backend: str = "emulated"  # library that computes the trainer's products; every backend keeps the contract
    reduction: str = "tree"  # order of row-parallel sums: "tree" (`kernels.sums.reference`), "ranks" (`parallel.row_sums`) or "fast"
    kv: str = "high"  # keys and values in the engine's cache: "high", "e4m3" or "e4m3_per_layer" (`precision.kv_cache`)
    parts: int = 1  # of a row-parallel sum with `reduction = "ranks"`, at least the trainer's tp
    attention: str | None = None  # `rollout.sglang.attention_backend`

    @classmethod
    def from_config(cls, precision: PrecisionConfig, parts: int = 1, attention: str | None = None) -> PrecisionContract:
        """Return the contract of a run. `parts` is `parallel.row_sums.count_parts`; what builds a trainer's layers gives it and
        `attention`."""
        fields = (precision.mode, precision.scale_format, precision.high, precision.backend, precision.reduction, precision.kv)
        return cls(*fields, parts, attention)

    @property
    def sums_by_tree(self) -> bool:
        """Whether row-parallel layers of trainer and engine sum by the tree. INT8 layers do not: each rank quantizes its part of a token,
        so the sum depends on the number of ranks."""
        return self.reduction == "tree" and (not self.engine_format.block or self.engine_format.block[1] > 0)

    @property
    def sums_by_ranks(self) -> bool:
        """Whether row-parallel layers of trainer and engine add rounded partial results in the order of ranks."""
        return self.reduction == "ranks"

    @property
    def trainer_quantizes_kv(self) -> bool:
        """Whether the trainer's attention quantizes keys and values like the engine: in modes that compute alike on both sides."""
        return self.kv != "high" and self.trainer_format == self.engine_format

    @property
    def engine_alone_quantizes_kv(self) -> bool:
        return self.kv != "high" and not self.trainer_quantizes_kv

    @property
    def scales_kv_by_layer(self) -> bool:
        """Whether each layer has one scale for its keys and one for its values (`ModelGeometry.kv_scales`)."""
        return self.kv == "e4m3_per_layer"

    def count_kv_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's keys, or values, of a token in the engine's cache, including a scale per token."""
        return self.high_format.count_bytes((1, head_dim)) if self.kv == "high" else head_dim + (not self.scales_kv_by_layer)

    @property
    def high_format(self) -> TensorFormat:
        """Format of unquantized tensors on both sides."""
        return FORMATS[self.high]

    @cached_property
    def engine_format(self) -> TensorFormat:
        """Format of the quantized roles in the engine; `high_format` if the mode quantizes nothing."""
        return (MODES[self.mode].engine or self.high_format).with_scales(self.scale_format)

    @cached_property
    def trainer_format(self) -> TensorFormat:
        """Format that the trainer computes with in layers of the quantized roles."""
        return (MODES[self.mode].trainer or self.high_format).with_scales(self.scale_format)

    def trainer_format_of(self, role: str) -> TensorFormat:
        """Return the format that the trainer computes with for weights of a role. The master of a quantized weight is FP32."""
        return self.trainer_format if role in QUANTIZED_ROLES else self.format_of(role)

    def spreads_parameter(self, role: str) -> bool:
        """Return whether parameters of a role are FP32 masters of a coarser format, which `precision.masters` spreads when they are loaded.
        The master of a BF16 parameter is in the optimizer."""
        return self.format_of(role).quantized and (self.trainer_format.quantized or self.high == FP32.name)

    def format_of(self, role: str) -> TensorFormat:
        """Return the format of weights of a role in the engine, in weight syncs and in exports."""
        if role in FP32_ROLES:
            return FP32
        return self.engine_format if role in QUANTIZED_ROLES else self.high_format
