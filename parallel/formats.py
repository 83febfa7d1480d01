"""How values are stored: the one table of number formats, and the precision modes made of them. No torch.

Everything that stores, moves or counts weights carries a `TensorFormat`, or asks a function from a weight's role to one. A new format is a
row of `FORMATS` and of `MODES` here, its quantizer (`megatron_rl.precision.quantizers`) and its product (`megatron_rl.kernels.linear`);
docs/extending.md has the recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

BLOCK = 128
"""Rows and columns of an FP8 weight block, and length of an activation group."""
SCALE = "scale"
"""Name of the formats of scales."""
SERVED_METHODS = ("fp8", "w8a8_int8")
"""Quantization methods that `rollout_sglang` serves, by SGLang's names."""


@dataclass(frozen=True)
class TensorFormat:
    """How a tensor is stored: its dtype, and for a quantized one the block of elements that shares a scale, and the scales themselves."""

    name: str
    dtype: str
    """Torch's name of it."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None for a tensor without scales. With 0 columns a whole row of the checkpoint's tensor shares
    one, also where a shard holds only some of its columns."""
    scale_dtype: str = "float32"
    scale_format: str = ""
    """Which numbers scales are: "pow2", "fp32", "e8m0". Where a row of the table leaves it empty, `precision.scale_format` says it."""
    scale_suffix: str = ""
    """What SGLang and checkpoints append to a weight's name for the name of its scales: x.weight -> x.weight_scale_inv."""
    quantization: tuple[tuple[str, object], ...] = ()
    """The `quantization_config` of a checkpoint, tuples for lists. SGLang knows the format by its `quant_method`."""
    serves_latent_attention: bool = True
    """SGLang absorbs kv_b_proj into latent attention (MLA) with the values that the format stands for."""

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
        """The format of the scales."""
        return TensorFormat(SCALE, self.scale_dtype)

    def scale_name(self, weight: str) -> str:
        """Return the name of the scales of a weight."""
        return weight + self.scale_suffix

    def scale_grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Return rows and columns of the scales of `rows` x `cols` elements; edge blocks may be partial."""
        assert self.block is not None
        return -(-rows // self.block[0]), -(-cols // self.block[1]) if self.block[1] else 1

    def count_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor of this shape, [..., rows, cols], with its scales."""
        size = math.prod(shape) * self.element_bytes
        if self.block is not None:
            size += math.prod((*shape[:-2], *self.scale_grid(*shape[-2:]))) * self.scale.element_bytes
        return size

    @property
    def group_bytes(self) -> float:
        """Bytes per element of an input of a product: its groups that share a scale are as long as a block is wide; a whole row's scale
        counts nothing."""
        assert self.block is not None
        return self.count_bytes((1, self.block[1])) / self.block[1] if self.block[1] else self.element_bytes

    def with_scales(self, scale_format: str) -> TensorFormat:
        """Return the format with these scales, where it is one that leaves them open."""
        return replace(self, scale_format=scale_format) if self.quantized and not self.scale_format else self

    def quantization_config(self) -> dict[str, object]:
        """Return the `quantization_config` of a checkpoint, as SGLang reads it; {} where nothing is quantized."""
        config = {name: list(value) if isinstance(value, tuple) else value for name, value in self.quantization}
        # makes the engine's activation scales powers of two as well
        return config | ({"scale_fmt": "ue8m0"} if self.scale_format == "pow2" else {})

    @property
    def engine_quantization(self) -> str | None:
        """SGLang's name of the format, for its argument `--quantization`; None for none."""
        return cast(str | None, dict(self.quantization).get("quant_method"))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.scale_format)))


FormatOf = Callable[[str], TensorFormat]
"""A weight's role -> its format."""

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
    quantization=(("quant_method", "w8a8_int8"), ("is_dynamic", True)),
    serves_latent_attention=False,  # values and scales would be rounded to BF16
)
FORMATS = {format.name: format for format in (BF16, FP32, FP8, INT8)}
"""By name. The first two store what is not quantized: `precision.high` names one of them."""


class Mode(NamedTuple):
    """What the weights of linear layers are, by role (`megatron_rl.precision.contract`), on both sides; None: in `precision.high`."""

    trainer: TensorFormat | None
    engine: TensorFormat | None


MODES = {"bf16": Mode(None, None), "fp8_rollout": Mode(None, FP8), "int8_rollout": Mode(None, INT8), "fp8_unified": Mode(FP8, FP8)}
"""By `precision.mode`."""
