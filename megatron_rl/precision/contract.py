"""The precision contract: which tensors are FP8 or INT8, how they are quantized, and what stays in high precision.

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

from megatron_rl.config import PrecisionConfig
from parallel.formats import BLOCK

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""

AMAX_EPSILON = 1e-10
"""Smallest block maximum, as SGLang clamps it; with it a pow2 block of zeros has scale 2^-42 on both sides."""

QUANTIZED_ROLES = frozenset({"attention_qkv", "attention_output", "mlp_in", "mlp_out"})
"""Roles of weights (`parallel.model_geometry`) that are FP8 in the FP8 modes, INT8 in `int8_rollout`; all others stay in high precision."""


@dataclass(frozen=True)
class PrecisionContract:
    """The contract of one run's configuration."""

    train_fp8: bool
    """The trainer's linear layers compute in FP8."""
    rollout_fp8: bool
    """The engine's linear layers compute in FP8."""
    scale_format: str
    high: str
    rollout_int8: bool = False
    """The engine's linear layers compute in INT8."""
    backend: str = "emulated"
    """Library that computes the trainer's FP8 products; every backend keeps the contract."""

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> PrecisionContract:
        return cls(
            train_fp8=precision.mode == "fp8_unified",
            rollout_fp8=precision.mode in ("fp8_unified", "fp8_rollout"),
            scale_format=precision.scale_format,
            high=precision.high,
            rollout_int8=precision.mode == "int8_rollout",
            backend=precision.backend,
        )

    @property
    def fp8_roles(self) -> frozenset[str]:
        """Roles of weights that the engine holds as E4M3 blocks with scales."""
        return QUANTIZED_ROLES if self.rollout_fp8 else frozenset()

    @property
    def int8_roles(self) -> frozenset[str]:
        """Roles of weights that the engine holds as INT8 with a scale per output channel."""
        return QUANTIZED_ROLES if self.rollout_int8 else frozenset()

    @property
    def engine_quantization(self) -> str | None:
        """SGLang's name of the quantization of the engine's linear layers; None for none."""
        return "fp8" if self.rollout_fp8 else "w8a8_int8" if self.rollout_int8 else None

    @property
    def activation_format(self) -> str | None:
        """How the engine's linear layers quantize their input: FP8 with `pow2` or `fp32` scales, `int8` per token, None for not at all."""
        return self.scale_format if self.rollout_fp8 else "int8" if self.rollout_int8 else None

    def hf_quantization_config(self) -> dict[str, object] | None:
        """Return the `quantization_config` of an exported checkpoint, as SGLang reads it; None where nothing is quantized."""
        if self.rollout_int8:
            return {"quant_method": "w8a8_int8", "is_dynamic": True}
        if not self.rollout_fp8:
            return None
        config: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }
        if self.scale_format == "pow2":
            config["scale_fmt"] = "ue8m0"  # makes the engine's activation scales powers of two as well
        return config
