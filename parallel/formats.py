"""Number formats of stored tensors, and the precision modes built from them. No torch. A new format needs a row in `FORMATS` and `MODES`, a
quantizer (`megatron_rl.precision.quantizers`) and a matrix product (`megatron_rl.kernels.linear`); see docs/extending.md."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

BLOCK = 128  # rows and columns of an FP8 weight block, and length of an activation group
SCALE = "scale"  # name of the formats of scales
NAMED_MODULES = frozenset({"modules_to_not_convert", "ignore"})
"""Fields of a `quantization_config` that name linear layers in high precision, of which SGLang reads one for each format."""
SERVED_METHODS = ("fp8", "w8a8_int8")  # quantization methods that `rollout_sglang` serves, under SGLang's names


@dataclass(frozen=True)
class TensorFormat:
    """How a tensor is stored: its dtype and, if it is quantized, its blocks and scales."""

    name: str
    dtype: str  # Torch's name of the dtype
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, or None without scales. 0 columns: a row of the checkpoint's tensor, however it is sharded."""
    scale_dtype: str = "float32"
    scale_format: str = ""  # values that scales may have: "pow2", "fp32" or "e8m0". If empty, `precision.scale_format` decides.
    scale_suffix: str = ""  # suffix that SGLang and checkpoints append to a weight's name for its scales: x.weight -> x.weight_scale_inv
    quantization: tuple[tuple[str, object], ...] = ()
    """`quantization_config` of a checkpoint, with tuples for lists. SGLang recognizes the format by its `quant_method`."""
    serves_latent_attention: bool = True  # whether SGLang absorbs kv_b_proj into latent attention (MLA) without rounding

    @property
    def quantized(self) -> bool:
        return self.block is not None

    @cached_property
    def element_bytes(self) -> int:
        return int(re.findall(r"\d+", self.dtype)[0]) // 8

    @property
    def safetensors_dtype(self) -> str:
        """Safetensors' name of the dtype: BF16, F8_E4M3."""
        match = re.fullmatch(r"(b?)(f|i|ui)\w*?(\d+)(_e\dm\d)?\w*", self.dtype)
        assert match, self.dtype
        return (match[1] + match[2][0] + match[3] + (match[4] or "")).upper()

    @cached_property
    def scale(self) -> TensorFormat:
        return TensorFormat(SCALE, self.scale_dtype)

    def scale_name(self, weight: str) -> str:
        return weight + self.scale_suffix

    def scale_grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return rows and columns of the scales of a [rows, cols] tensor. Edge blocks may be partial."""
        assert self.block is not None
        return -(-rows // self.block[0]), -(-cols // self.block[1]) if self.block[1] else 1

    def count_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of shape [..., rows, cols], including its scales."""
        size = math.prod(shape) * self.element_bytes
        if self.block is not None:
            size += math.prod((*shape[:-2], *self.scale_grid(*shape[-2:]))) * self.scale.element_bytes
        return size

    @property
    def group_bytes(self) -> float:
        """Bytes per element of a product's input, whose groups are as long as a block is wide. A scale of a whole row counts as 0."""
        assert self.block is not None
        return self.count_bytes((1, self.block[1])) / self.block[1] if self.block[1] else self.element_bytes

    def with_scales(self, scale_format: str) -> TensorFormat:
        """Return the format with these scales, or unchanged if it fixes its scales or has none."""
        return replace(self, scale_format=scale_format) if self.quantized and not self.scale_format else self

    @property
    def names_modules(self) -> bool:
        """Whether `quantization_config` can name linear layers that stay in high precision."""
        return any(field in NAMED_MODULES for field, _ in self.quantization)

    def quantization_config(self, unquantized: Sequence[str] = ()) -> dict[str, object]:
        """Return the `quantization_config` of a checkpoint as SGLang reads it, or {} if nothing is quantized. `unquantized`: names of
        linear layers in high precision, beside those of every model."""
        config = {name: list(value) if isinstance(value, tuple) else value for name, value in self.quantization}
        for field in NAMED_MODULES & config.keys():
            config[field] = [*cast(list[str], config[field]), *unquantized]
            if not config[field]:
                del config[field]
        # "ue8m0" makes the engine's activation scales powers of two as well
        return config | ({"scale_fmt": "ue8m0"} if self.scale_format == "pow2" else {})

    @property
    def engine_quantization(self) -> str | None:
        """SGLang's name of the format for its argument `--quantization`, or None."""
        return cast(str | None, dict(self.quantization).get("quant_method"))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.scale_format)))


FormatOf = Callable[[str], TensorFormat]  # maps a weight's role to its format

BF16, FP32 = TensorFormat("bf16", "bfloat16"), TensorFormat("fp32", "float32")
FP8 = TensorFormat(
    "fp8",
    "float8_e4m3fn",
    (BLOCK, BLOCK),
    scale_suffix="_scale_inv",
    quantization=(
        ("quant_method", "fp8"),
        ("fmt", "e4m3"),
        ("activation_scheme", "dynamic"),
        ("weight_block_size", (BLOCK, BLOCK)),
        ("modules_to_not_convert", ("lm_head",)),
    ),
)
INT8 = TensorFormat(
    "int8",
    "int8",
    (1, 0),
    scale_format="fp32",
    scale_suffix="_scale",
    quantization=(("quant_method", "w8a8_int8"), ("is_dynamic", True), ("ignore", ())),
    serves_latent_attention=False,  # values and scales would be rounded to BF16
)
FORMATS = {format.name: format for format in (BF16, FP32, FP8, INT8)}
"""Formats by name. `precision.high` names the format of unquantized tensors: bf16 or fp32."""


class Mode(NamedTuple):
    """Formats of the linear layers' weights (`megatron_rl.precision.contract`) on both sides; None means `precision.high`."""

    trainer: TensorFormat | None
    engine: TensorFormat | None


MODES = {"bf16": Mode(None, None), "fp8_rollout": Mode(None, FP8), "int8_rollout": Mode(None, INT8), "fp8_unified": Mode(FP8, FP8)}
"""Modes by their name in `precision.mode`."""
