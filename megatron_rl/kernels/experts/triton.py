"""The Triton kernels of `kernels.experts.reference`: they move rows of tokens to their experts and back, and quantize on the way.

The quantizing kernels replace several operators: they pack tokens into the bytes and scales that are sent, spread packed tokens to padded
rows (`token_groups`), and weight and quantize gradients into such rows. Layouts, bytes and scales equal those of
`kernels.quantize.triton`; a gradient is rounded before it is quantized. A packed token is int32 [K/4 + K/128]: K bytes, then its scales.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.kernels.quantize.triton import (
    LAUNCH,
    QuantizedPair,
    _e4m3_bytes,
    _number_tokens,
    _scale_and_inverse,
    _store_columns,
    _store_rows,
    allocate,
    choose_launch,
    shape_groups,
)
from megatron_rl.precision.contract import AMAX_EPSILON, E4M3_MAX
from parallel.formats import BLOCK


@triton.jit
def scatter_row(x, order, result, width, K: tl.constexpr, WIDTH_TILE: tl.constexpr):
    """Copy one token of x [n, width] to its K places in the result."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    row = tl.load(x + token * width + column, mask=column < width)
    for number in tl.static_range(K):
        place = tl.load(order + token * K + number)
        tl.store(result + place * width + column, row, mask=column < width)


@triton.jit
def sum_row(x, order, result, width, K: tl.constexpr, WIDTH_TILE: tl.constexpr):
    """Compute one token of the result [n, width] as the sum of its K rows of x."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    total = tl.zeros([WIDTH_TILE], tl.float32)
    for number in tl.static_range(K):
        place = tl.load(order + token * K + number)
        total += tl.load(x + place * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=column < width)


@triton.jit
def collect_row(x, places, weights, result, width, WEIGHS: tl.constexpr, WIDTH_TILE: tl.constexpr):
    """Compute one row of the result [n, width]."""
    number, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE)
    row = tl.load(x + tl.load(places + number) * width + column, mask=column < width, other=0.0)
    if WEIGHS:
        row = (row.to(tl.float32) * tl.load(weights + number)).to(result.dtype.element_ty)
    tl.store(result + number * width + column, row, mask=column < width)


def scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `[n k, h]`: x `[n, h]` at the places `order` `[n, k]`. Raise ValueError if x and `order` differ in n."""
    x, (tokens, k) = x.contiguous(), order.shape
    if x.dim() != 2 or len(x) != tokens:
        raise ValueError(f"x {list(x.shape)} does not match the places of tokens {list(order.shape)}")
    result = torch.empty(tokens * k, x.shape[1], dtype=x.dtype, device=x.device)
    if result.numel():
        scatter_row[(tokens,)](x, order.contiguous(), result, x.shape[1], K=k, **choose_launch(x.shape[1]))
    return result


def sum_rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `[n, h]`: the sums of the rows `order` `[n, k]` of x `[m, h]`."""
    x, (tokens, k) = x.contiguous(), order.shape
    result = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    if result.numel():
        sum_row[(tokens,)](x, order.contiguous(), result, x.shape[1], K=k, **choose_launch(x.shape[1]))
    return result


def collect(x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `kernels.experts.reference.collect`."""
    x, result = x.contiguous(), torch.empty(len(places), x.shape[1], dtype=x.dtype, device=x.device)
    if result.numel():
        given = torch.empty(0, device=x.device) if weights is None else weights.contiguous()
        collect_row[(len(places),)](x, places, given, result, x.shape[1], WEIGHS=weights is not None, **choose_launch(x.shape[1]))
    return result


@triton.jit
def quantize_weighed_tile(
    gradient, outputs, weights, of_weights, row_data, row_scale, column_data, column_scale, sources, group_start, group_length, tokens,
    rows, width, POW2: tl.constexpr, COLUMNS: tl.constexpr, BY_TOKEN: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program per 128x128 tile of the rows. It writes its part of each token's sum to `of_weights` float32 [width / 128, tokens]."""
    tile, column_tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, column = _number_tokens(tile * TILE, TILE), column_tile * TILE + tl.arange(0, TILE)[None, None, :]
    source = tl.load(sources + row).to(tl.int64)
    inside = source >= 0
    values = tl.load(gradient + source[:, :, None] * width + column, mask=inside[:, :, None], other=0.0).to(tl.float32)
    output = tl.load(outputs + row[:, :, None] * width + column, mask=inside[:, :, None], other=0.0).to(tl.float32)
    tl.store(of_weights + column_tile * tokens + source, tl.sum(values * output, axis=2), mask=inside)
    weight = tl.load(weights + source, mask=inside, other=0.0)
    values = (values * weight[:, :, None]).to(gradient.dtype.element_ty).to(tl.float32)
    _store_rows(values, row_data, row_scale, row, column_tile, rows, width, rows, 1, POW2, EPSILON, LARGEST, TILE)
    if COLUMNS:
        _store_columns(
            values, column_data, column_scale, group_start, group_length, row, tile, column_tile, rows, width, POW2, True, EPSILON,
            LARGEST, TILE, BY_TOKEN,
        )  # fmt: skip


@triton.jit
def pack_token(
    x, order, data, scales, width, packed_bytes, K: tl.constexpr, POW2: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    TILE: tl.constexpr, WIDTH_TILE: tl.constexpr,
):  # fmt: skip
    """One program per token of x [n, width]; `data` and `scales` point to the bytes and scales of the first packed token."""
    token, block = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE // TILE)
    column, is_block = block[:, None] * TILE + tl.arange(0, TILE)[None, :], block * TILE < width
    values = tl.load(x + token * width + column, mask=is_block[:, None], other=0.0).to(tl.float32)
    scale, inverse = _scale_and_inverse(tl.max(tl.abs(values), axis=1), POW2, EPSILON, LARGEST)
    quantized = _e4m3_bytes(values * inverse[:, None])
    for number in tl.static_range(K):
        place = tl.load(order + token * K + number) * packed_bytes
        tl.store(data + place + column, quantized, mask=is_block[:, None])
        tl.store(scales + place // 4 + block, scale, mask=is_block)


@triton.jit
def spread_packed_row(packed, sources, owners, data, scales, rows, width, blocks, WIDTH_TILE: tl.constexpr, BLOCKS_TILE: tl.constexpr):
    """One program per row: int32 data [rows, width] and scales [blocks, rows] of packed tokens [n, width + blocks]. It leaves out a row of
    no expert."""
    row, column, block = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_TILE), tl.arange(0, BLOCKS_TILE)
    source, owned = tl.load(sources + row).to(tl.int64), tl.load(owners + row) >= 0
    start = packed + source * (width + blocks)
    values = tl.load(start + column, mask=(column < width) & (source >= 0), other=0)
    tl.store(data + row * width + column, values, mask=(column < width) & owned)
    values = tl.load(start + width + block, mask=(block < blocks) & (source >= 0), other=0)
    tl.store(scales + block * rows + row, values, mask=(block < blocks) & owned)


def quantize_weighed(
    gradient: torch.Tensor,
    outputs: torch.Tensor,
    weights: torch.Tensor,
    groups: TokenGroups,
    scale_format: str,
    *,
    columns: bool,
    by_token: bool = False,
) -> tuple[QuantizedPair, QuantizedPair | None, torch.Tensor]:
    """Return (rows, columns, gradient of the weights float32 `[n]`). Raise ValueError for shapes that do not match.

    Rows and columns are those of `quantize_activation` for gradient `[n, K]` times weights float32 `[n]`. The gradient of the weights is
    the sum of gradient times outputs `[T, K]` over K.
    """
    tokens, width = gradient.shape
    fits = outputs.shape == (groups.rows, width) and len(weights) == len(groups.places) == tokens
    if width % BLOCK or not fits or outputs.dtype != gradient.dtype:
        raise ValueError(f"gradient {list(gradient.shape)}, outputs {list(outputs.shape)}, weights and groups do not match")
    rows, column_pair = allocate(groups.rows, width, gradient.device, rows=True, columns=columns)
    assert rows is not None
    sums = torch.empty(width // BLOCK, tokens, dtype=torch.float32, device=gradient.device)
    unused: Any = torch.empty(0, dtype=torch.uint8, device=gradient.device)
    column_data, column_scale = (column_pair[0].view(torch.uint8), column_pair[1]) if column_pair else (unused, unused)
    if groups.rows:
        quantize_weighed_tile[(groups.rows // BLOCK, width // BLOCK)](
            gradient.contiguous(), outputs, weights.contiguous(), sums, rows[0].view(torch.uint8), rows[1], column_data, column_scale,
            groups.sources, *groups.tiles, tokens, groups.rows, width, POW2=scale_format == "pow2", COLUMNS=columns, BY_TOKEN=by_token,
            EPSILON=AMAX_EPSILON, LARGEST=E4M3_MAX, TILE=BLOCK, **LAUNCH,
        )  # fmt: skip
    return rows, shape_groups(column_pair, groups, by_token), sums.sum(0)


def pack(x: torch.Tensor, order: torch.Tensor, scale_format: str, rows: int | None = None) -> torch.Tensor:
    """Quantize tokens x `[n, K]` and return them packed, int32 `[rows, K/4 + K/128]`, at the places `order` int64 `[n, k]` of n k or more
    rows. Raise ValueError if K is not a multiple of 128 or the shapes do not match."""
    (tokens, k), width = order.shape, x.shape[1]
    if width % BLOCK or len(x) != tokens:
        raise ValueError(
            f"x {list(x.shape)}: the width must be a multiple of {BLOCK}, and order {list(order.shape)} must have a row per token"
        )
    packed = torch.empty(rows or tokens * k, width // 4 + width // BLOCK, dtype=torch.int32, device=x.device)
    if tokens:
        formula: Any = {"POW2": scale_format == "pow2", "EPSILON": AMAX_EPSILON, "LARGEST": E4M3_MAX, "TILE": BLOCK}
        data, scales = packed.view(torch.uint8)[:, :width], packed.view(torch.float32)[:, width // 4 :]
        arguments = x.contiguous(), order.contiguous(), data, scales, width, 4 * packed.shape[1]
        pack_token[(tokens,)](*arguments, K=k, **formula, **choose_launch(width))
    return packed


def spread_packed(packed: torch.Tensor, groups: TokenGroups) -> QuantizedPair:
    """Return the rows of packed tokens `[n, K/4 + K/128]`, with zeros in the padding of experts. Raise ValueError for other shapes."""
    width = packed.shape[1] * 32 // 33
    blocks = packed.shape[1] - width
    if width != 32 * blocks or len(packed) != len(groups.places):
        raise ValueError(f"packed tokens {list(packed.shape)} do not match their groups")
    rows, _ = allocate(groups.rows, 4 * width, packed.device, rows=True, columns=False)
    assert rows is not None
    data, scale = rows
    if groups.rows:
        launch = choose_launch(width)
        spread_packed_row[(groups.rows,)](
            packed.contiguous(), groups.sources, groups.experts, data.view(torch.int32), scale.t().view(torch.int32), groups.rows, width,
            blocks, BLOCKS_TILE=triton.next_power_of_2(blocks), **launch,
        )  # fmt: skip
    return rows


@triton.jit
def place_rows(
    chosen, weights, counts, sizes, noted, places, sent, span, ranks, experts, rows, total, RANKS: tl.constexpr, EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program for TILE rows of a rank's tokens. `span` is the number of `weights` of a rank, `experts` that of its experts."""
    rank, expert = tl.arange(0, RANKS), tl.arange(0, EXPERTS)
    real = (rank[:, None] < ranks) & (expert[None, :] < experts)
    of_ranks = tl.sum(tl.load(counts + rank[:, None] * experts + expert[None, :], mask=real, other=0), axis=1)
    spare = tl.load(sizes + rank, mask=rank < ranks, other=0) - of_ranks
    shifts = tl.cumsum(spare, 0) - spare
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    source = tl.load(chosen + row, mask=row < rows, other=0)
    shift = tl.sum(tl.where((source // span)[:, None] == rank[None, :], shifts[None, :], 0), axis=1)
    place = tl.minimum(row + shift, total - 1)
    tl.store(places + row, place, mask=row < rows)
    tl.store(sent + place, tl.load(weights + source, mask=row < rows, other=0.0), mask=row < rows)
    if tl.program_id(0) == 0:
        share = tl.div_rn(of_ranks.to(tl.float32), tl.full([RANKS], 1.0, tl.float32) * rows)
        tl.store(noted + rank, tl.maximum(share, tl.load(noted + rank, mask=rank < ranks, other=0.0)), mask=rank < ranks)
        tl.store(noted + ranks, tl.maximum(tl.max(-spare, axis=0).to(tl.float32), tl.load(noted + ranks)))


def place_tokens(
    chosen: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor, noted: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.experts.reference.place_tokens`."""
    ranks, rows = len(sizes), len(chosen)
    places, sent = torch.empty_like(chosen), weights.new_empty(total)
    shape: Any = {"RANKS": triton.next_power_of_2(ranks), "EXPERTS": triton.next_power_of_2(len(counts) // ranks), "TILE": BLOCK}
    tables = chosen, weights, counts, sizes, noted, places, sent
    place_rows[(triton.cdiv(rows, BLOCK),)](*tables, len(weights) // ranks, ranks, len(counts) // ranks, rows, total, **shape)
    return places, sent


@triton.jit
def tabulate_tile(counts, sources, owners, places, size, parts, experts, PARTS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """One program for TILE rows, which belong to one expert."""
    part, expert = tl.arange(0, PARTS), tl.arange(0, EXPERTS)
    real = (part[None, :] < parts) & (expert[:, None] < experts)
    count = tl.load(counts + part[None, :] * experts + expert[:, None], mask=real, other=0)
    length = (tl.sum(count, axis=1) + TILE - 1) // TILE * TILE
    start = tl.cumsum(length, 0) - length
    first = tl.program_id(0).to(tl.int64) * TILE
    owns = (first >= start) & (first < start + length)
    owner = tl.sum(tl.where(owns, expert + 1, 0), axis=0) - 1  # -1 behind the last group
    own = tl.sum(tl.where(expert[:, None] == owner, count, 0), axis=0)
    first_row = tl.sum(tl.where(owns, start, 0), axis=0) + tl.cumsum(own, 0) - own
    first_token = part * size + tl.sum(tl.where(expert[:, None] < owner, count, 0), axis=0)
    row = first + tl.arange(0, TILE)
    inside = (row[:, None] >= first_row[None, :]) & (row[:, None] < (first_row + own)[None, :])
    token = tl.sum(tl.where(inside, row[:, None] + (first_token - first_row)[None, :], 0), axis=1)
    token = tl.minimum(token, parts * size - 1)
    holds = tl.sum(inside.to(tl.int32), axis=1) > 0
    tl.store(sources + row, tl.where(holds, token, -1).to(tl.int32))
    tl.store(owners + row, tl.zeros([TILE], tl.int32) + owner)
    tl.store(places + token, row, mask=holds)


def tabulate_parts(counts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `kernels.experts.reference.tabulate_parts`."""
    parts, experts = counts.shape
    tiles = parts * size // BLOCK + experts
    sources, owners = (torch.empty(tiles * BLOCK, dtype=torch.int32, device=counts.device) for _ in range(2))
    places = counts.new_zeros(parts * size)
    shape: Any = {"PARTS": triton.next_power_of_2(parts), "EXPERTS": triton.next_power_of_2(experts), "TILE": BLOCK}
    tabulate_tile[(tiles,)](counts.contiguous(), sources, owners, places, size, parts, experts, **shape)
    return sources, owners, places
