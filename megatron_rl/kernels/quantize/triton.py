"""A Triton kernel that quantizes an activation both ways in one pass: Q_1x128(x), and Q_128x1(x) already transposed.

Bytes and scales equal those of `precision.fp8`, in the layouts that block-scaled GEMMs on Hopper read without another copy:

    rows      data [T, K], scales [T, K/128] with T contiguous, padded to 4 in memory (TMA requires 16-byte strides); or into given tensors,
              whose scales may have Blackwell's layout (`precision.ue8m0`)
    columns   data [K, T'], scales [K, T'/128] with K contiguous; T' is T padded to 128 with zeros. Grouped products on Blackwell take
              data [T, K], not transposed (`by_token`)
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from megatron_rl.precision.ue8m0 import GROUPS_PER_WORD
from parallel.formats import BLOCK

QuantizedPair = tuple[torch.Tensor, torch.Tensor]

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""No fused multiply-add: the reference rounds x * inverse before it adds the magic number."""
ROW_COLUMNS = 1024  # columns of a program that quantizes part of a token
FEW_TOKENS = 256  # up to which tiles of 128 tokens would leave most processors idle
ROW_TOKENS = 32  # tokens of a program that quantizes only rows
HARDWARE = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "0")  # compiled kernels take the cast of sm_89 and later


def align(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if its address is no multiple of 16 bytes. Triton would compile another kernel for it, which may add in another
    order. Allocations of torch are aligned."""
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def choose_launch(width: int) -> dict[str, int | bool]:
    """Return the launch options of a program on whole rows. Without fused multiply-add it rounds as separate operators do."""
    warps = 4 if width <= 2048 else 8 if width <= 4096 else 16
    return {"WIDTH_TILE": triton.next_power_of_2(width), "num_warps": warps, "enable_fp_fusion": False}


@triton.jit
def _scale_and_inverse(amax, POW2: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr):
    """Compute `precision.fp8.compute_scales`."""
    amax = tl.maximum(amax, EPSILON)
    if POW2:
        exponent = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
        return exponent.to(tl.float32, bitcast=True), ((254 << 23) - exponent).to(tl.float32, bitcast=True)  # 1 / 2^e, exactly
    inverse = tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)  # `/` is an approximate division on a GPU
    return tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), inverse), inverse


@triton.jit
def _e4m3_bytes(values, HARDWARE: tl.constexpr = HARDWARE):
    """Round float32 values of magnitude at most 448 (1 + 2^-23), as all quantized values are, like a cast of torch: to nearest even, and
    infinities to NaN. The hardware's cast, one instruction for two values, would make them 448. The interpreter's cast does not round, so
    that values are rounded like `precision.fp8.round_to_e4m3_` before; -0 keeps its sign."""
    if HARDWARE:
        return tl.fma(values, 0.0, values).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = values.to(tl.int32, bitcast=True)
    binade = tl.maximum(bits & 0x7F800000, 121 << 23)
    magic = (binade + (20 << 23)).to(tl.float32, bitcast=True) * 1.5
    rounded = ((values + magic) - magic) + (values - values)
    signed = rounded.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return signed.to(tl.float32, bitcast=True).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _number_tokens(first, COUNT: tl.constexpr):
    """Return the numbers of COUNT tokens from `first` on, [4, COUNT / 4]. A tile of values is [4, COUNT / 4, TILE]: a thread then holds
    four tokens in a row, whose bytes it packs into a word."""
    return first + (tl.arange(0, 4)[:, None] + 4 * tl.arange(0, COUNT // 4)[None, :])


@triton.jit
def _store_rows(
    values, data, scales, token, column_tile, tokens, width, stride, step, POW2: tl.constexpr, EPSILON: tl.constexpr,
    LARGEST: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr = False,
):  # fmt: skip
    """Write Q_1x128 of a tile of float32 values, for the first `tokens` tokens."""
    column, inside = column_tile * TILE + tl.arange(0, TILE), token < tokens
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(values), axis=2), POW2, EPSILON, LARGEST)
    target = data + token[:, :, None] * width + column[None, None, :]
    tl.store(target, _e4m3_bytes(values * inverse[:, :, None]), mask=inside[:, :, None])
    if PACKED:  # `scales` are bytes, of four tiles next to each other
        byte = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales + column_tile // 4 * stride + token * step + column_tile % 4, byte, mask=inside)
    else:
        tl.store(scales + column_tile * stride + token * step, scale, mask=inside)


@triton.jit
def _store_columns(
    values, data, scales, group_start, group_length, token, token_tile, column_tile, tokens, width, POW2: tl.constexpr,
    GROUPED: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, BY_TOKEN: tl.constexpr = False,
):  # fmt: skip
    """Write Q_128x1 of a tile of TILE tokens, transposed unless BY_TOKEN; `tokens`, a multiple of 16, is the number of tokens of the
    result."""
    column = column_tile * TILE + tl.arange(0, TILE)
    scale, inverse = _scale_and_inverse(tl.max(tl.max(tl.abs(values), axis=0), axis=0), POW2, EPSILON, LARGEST)
    values = values * inverse[None, None, :]
    if BY_TOKEN:
        tl.store(data + token[:, :, None] * width + column[None, None, :], _e4m3_bytes(values), mask=(token < tokens)[:, :, None])
    else:
        start, length = tl.zeros([], tl.int64), tokens
        if GROUPED:  # each group of tokens (an expert) has its own matrix [width, length], one after the other
            start = tl.multiple_of(tl.load(group_start + token_tile), TILE)
            length = tl.multiple_of(tl.load(group_length + token_tile), TILE)
        word, words = (token_tile * TILE - start) // 4 + tl.arange(0, TILE // 4), tl.multiple_of(length // 4, 4)
        target = (data + start * width).to(tl.pointer_type(tl.int32)) + column[:, None] * words + word[None, :]
        tl.store(target, tl.trans(_pack_tokens(values)), mask=(word < words)[None, :])
    tl.store(scales + token_tile * width + column, scale)


@triton.jit
def _pack_tokens(values):
    """[4, n, TILE] -> int32 [n, TILE] of four bytes: shared memory then transposes words. The cast rounds pairs of neighbors, so it gets
    pairs of tokens."""
    pairs = tl.reshape(tl.permute(values, (1, 2, 0)), (values.shape[1], values.shape[2], 2, 2))
    low, high = tl.split(_e4m3_bytes(tl.join(*tl.split(pairs))))
    low, high = tl.split(low.to(tl.int32) | (high.to(tl.int32) << 8))
    return low | (high << 16)


@triton.jit(do_not_specialize=["tokens"])
def quantize_tile(
    x, row_data, row_scale, column_data, column_scale, sources, group_start, group_length, tokens, padded_tokens, width, row_scale_stride,
    row_scale_step, POW2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, PACKED: tl.constexpr,
    BY_TOKEN: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per TOKENSx128 tile of x [tokens, width], or of its rows spread to groups."""
    token_tile, column_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = _number_tokens(token_tile * TOKENS, TOKENS)
    column = column_tile * TILE + tl.arange(0, TILE)
    source, inside = token, token < tokens
    if GROUPED:
        source = tl.load(sources + token).to(tl.int64)
        inside = source >= 0
    values = tl.load(x + source[:, :, None] * width + column[None, None, :], mask=inside[:, :, None], other=0.0).to(tl.float32)
    if ROWS:
        _store_rows(
            values, row_data, row_scale, token, column_tile, tokens, width, row_scale_stride, row_scale_step, POW2, EPSILON, LARGEST, TILE,
            PACKED,
        )  # fmt: skip
    if COLUMNS:
        _store_columns(
            values, column_data, column_scale, group_start, group_length, token, token_tile, column_tile, padded_tokens, width, POW2,
            GROUPED, EPSILON, LARGEST, TILE, BY_TOKEN,
        )  # fmt: skip


@triton.jit
def _store_groups(
    values, data, scales, token, first, width, stride, step, POW2: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write Q_1x128 of COLUMNS float32 values of a token, from column `first` on."""
    groups = tl.reshape(values, (COLUMNS // TILE, TILE))
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(groups), axis=1), POW2, EPSILON, LARGEST)
    group = first // TILE + tl.arange(0, COLUMNS // TILE)
    inside = group * TILE < width
    target = data + token * width + (group * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    tl.store(target, _e4m3_bytes(groups * inverse[:, None]), mask=inside[:, None])
    tl.store(scales + group * stride + token * step, scale, mask=inside)


@triton.jit(do_not_specialize=["row_scale_stride", "row_scale_step"])
def quantize_row(
    x, row_data, row_scale, width, row_scale_stride, row_scale_step, POW2: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program for COLUMNS columns of a token of x [T, width]."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    values = tl.load(x + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    _store_groups(values, row_data, row_scale, token, first, width, row_scale_stride, row_scale_step, POW2, EPSILON, LARGEST, TILE, COLUMNS)


def quantize_activation(
    x: torch.Tensor, scale_format: str, *, rows: bool, columns: bool, groups: TokenGroups | None = None, by_token: bool = False
) -> tuple[QuantizedPair | None, QuantizedPair | None]:
    """Return (rows, columns) of x `[T, K]` in BF16, FP16 or float32: each a pair (E4M3 data, float32 scales) in the layout of the module
    docstring, or None if not requested.

    With `groups`, the tokens are spread to the padded rows of the groups, and `columns` data is flat: `[K, length]` of one group after the
    other, or `[T, K]` if `by_token`. Raise ValueError if K is not a multiple of 128 or the groups have another number of tokens.
    """
    tokens, width = x.shape
    if width % BLOCK or (groups is not None and len(groups.places) != tokens):
        raise ValueError(f"x {list(x.shape)}: the width must be a multiple of {BLOCK}, and groups must have all tokens")
    row_pair, column_pair = allocate(tokens if groups is None else groups.rows, width, x.device, rows=rows, columns=columns)
    _launch(x.contiguous(), scale_format, row_pair, column_pair, groups, by_token)
    return row_pair, shape_groups(column_pair, groups, by_token)


def allocate(
    tokens: int, width: int, device: torch.device, *, rows: bool, columns: bool, row_multiple: int = 1, column_multiple: int = BLOCK
) -> tuple[QuantizedPair | None, QuantizedPair | None]:
    """Return uninitialized (rows, columns) in the layout of the module docstring, with tokens padded to the multiples."""
    empty: Any = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
    row_pair = column_pair = None
    if rows:
        count = triton.cdiv(tokens, row_multiple) * row_multiple
        row_scale = empty(width // BLOCK, triton.cdiv(count, 4) * 4, dtype=torch.float32)
        row_pair = empty(count, width, dtype=torch.float8_e4m3fn), row_scale.t()[:count]
    if columns:
        count = triton.cdiv(tokens, column_multiple) * column_multiple
        column_pair = empty(width, count, dtype=torch.float8_e4m3fn), empty(-(-tokens // BLOCK), width, dtype=torch.float32).t()
    return row_pair, column_pair


def shape_groups(columns: QuantizedPair | None, groups: TokenGroups | None, by_token: bool) -> QuantizedPair | None:
    """Return `columns` `[K, T]`; if there are groups, with flat data, or with data `[T, K]` if `by_token`."""
    if columns is None or groups is None:
        return columns
    return columns[0].view(columns[0].shape[::-1]) if by_token else columns[0].flatten(), columns[1]


def quantize_into(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, scale_format: str) -> None:
    """Write Q_1x128(x) of contiguous x `[T, K]` in BF16, FP16 or float32, K a multiple of 128, into contiguous E4M3 `data` `[T, K]` and
    float32 `scale` `[T, K/128]` of any strides, or int32 `[T, K/512 rounded up]` in the layout of `precision.ue8m0`. Raise ValueError for
    other shapes or dtypes."""
    tokens, width = x.shape
    packed = scale.dtype == torch.int32 and scale_format == "pow2" and scale.stride(0) == 1
    groups = -(-width // (GROUPS_PER_WORD * BLOCK)) if packed else width // BLOCK
    fits = width % BLOCK == 0 and data.shape == x.shape and scale.shape == (tokens, groups) and (packed or scale.dtype == torch.float32)
    if not (fits and x.is_contiguous() and data.is_contiguous()) or data.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"x {list(x.shape)}, data {list(data.shape)} {data.dtype} and scales {list(scale.shape)} {scale.dtype} do not match"
        )
    if packed and width % (GROUPS_PER_WORD * BLOCK):
        scale.zero_()
    if 0 < tokens <= FEW_TOKENS and not packed:
        formula: Any = {"POW2": scale_format == "pow2", "EPSILON": AMAX_EPSILON, "LARGEST": E4M3_MAX, "TILE": BLOCK}
        quantize_row[(tokens, triton.cdiv(width, ROW_COLUMNS))](
            x, data.view(torch.uint8), scale, width, scale.stride(1), scale.stride(0), COLUMNS=ROW_COLUMNS, **formula, **LAUNCH
        )
        return
    _launch(x, scale_format, (data, scale), None, None)


def _launch(
    x: torch.Tensor,
    scale_format: str,
    rows: QuantizedPair | None,
    columns: QuantizedPair | None,
    groups: TokenGroups | None,
    by_token: bool = False,
) -> None:
    """Fill each pair (E4M3 data, scales) that is not None."""
    tokens, width = (len(x) if groups is None else groups.rows), x.shape[1]
    blocks = -(-tokens // BLOCK)
    unused = torch.empty(0, dtype=torch.uint8, device=x.device), torch.empty(0, dtype=torch.float32, device=x.device)
    row_data, row_scale = (rows[0].view(torch.uint8), rows[1]) if rows else unused
    column_data, column_scale = (columns[0].view(torch.uint8), columns[1]) if columns else unused
    tables = (groups.sources, *groups.tiles) if groups is not None else (unused[1],) * 3
    if not tokens:
        return
    stride, step, packed = row_scale.stride(-1), row_scale.stride(0), row_scale.dtype == torch.int32
    if packed:
        row_scale, stride, step = row_scale.t().view(torch.uint8), stride * GROUPS_PER_WORD, step * GROUPS_PER_WORD
    program, pow2 = BLOCK if columns else ROW_TOKENS, scale_format == "pow2"
    limit = {"maxnreg": 168} if rows and columns and pow2 and groups is None else {}  # three programs on a multiprocessor
    quantize_tile[(triton.cdiv(tokens, program), width // BLOCK)](
        x, row_data, row_scale, column_data, column_scale, *tables, tokens, blocks * BLOCK, width, stride, step,
        POW2=pow2, ROWS=rows is not None, COLUMNS=columns is not None, GROUPED=groups is not None, PACKED=packed,
        BY_TOKEN=by_token, EPSILON=AMAX_EPSILON, LARGEST=E4M3_MAX, TILE=BLOCK, TOKENS=program, **LAUNCH, **limit,
    )  # fmt: skip
