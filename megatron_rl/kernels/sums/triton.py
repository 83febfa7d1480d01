"""The Triton kernels of `kernels.sums.reference`, and of sums over rows. Products that sum by the tree:

A program computes a tile of results, leaf after leaf. A leaf is a product of 128 numbers in the tensor cores, starting from zero, times the
scales of its FP8 blocks. It is added to the nodes that wait for it (`parallel.row_sums.list_merges`). There is at most one such node per
level, held in registers: with tiles of 64 x 64, eight levels (32,768 numbers on a rank) fit, and further levels are spilled. Tiles do not
depend on the number of tokens, so neither do the bits of a token. Work is split only at nodes of the tree, which changes no bit.
"""

import functools

import torch
import triton
import triton.language as tl

from parallel.formats import BLOCK
from parallel.row_sums import GPU_TILE as TILE
from parallel.row_sums import LEAF, list_merges

GROUP = 12  # row tiles that share a column tile in turn, so that its data stay in the GPU's cache
LAUNCH = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}  # no fused multiply-add: a scaled leaf is rounded before it is added
MAX_NODES, _ENOUGH_PROGRAMS = 8, 128
ADD_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
ADDED = 1024  # results of a program of `add_parts`
_TALL = {"ROWS": 128, "COLUMNS": 32}  # numbers that a program of `add_tall_columns` reads at a time


@triton.jit
def _add_leaf(total, slots, level, completed, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Add a leaf to the waiting nodes of levels FIRST to LAST; `slots[-1]` becomes the root."""
    for at in tl.static_range(FIRST, LAST):
        slot = slots[at]
        if at == len(slots) - 1:  # noqa: SIM102 - known when compiling
            if completed > at:
                slot += total
        if completed == at:
            slot = total
        if (level <= at) & (completed > at):
            total = slots[at] + total
        slots = slots[:at] + (slot,) + slots[at + 1 :]  # noqa: RUF005 - Triton's tuples have no other form
    return total, slots


@triton.jit(do_not_specialize=["tokens"])
def multiply_tile(
    x, weight, result, x_scale, weight_scale, merges, tokens, features, width, leaves, x_scale_stride, x_scale_step, weight_scale_stride,
    weight_scale_step, SCALED: tl.constexpr, WHOLE: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    LEAF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per tile of `result` [nodes, tokens, features] from x [tokens, width] and weight [features, width]. A node has `leaves`
    leaves. WHOLE: `width` is a multiple of LEAF."""
    row_tiles, column_tiles, node = tl.cdiv(tokens, TILE), tl.cdiv(features, TILE), tl.program_id(1)
    first_row = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    rows_of_group = tl.minimum(row_tiles - first_row, GROUP)
    place = tl.program_id(0) % (GROUP * column_tiles)
    row = (first_row + place % rows_of_group) * TILE + tl.arange(0, TILE)
    column = place // rows_of_group * TILE + tl.arange(0, TILE)
    read_row, read_column, number = (
        row % tokens,
        column % features,
        tl.arange(0, LEAF),
    )  # beyond the end, any row is read; its result is not stored
    x += read_row[:, None].to(tl.int64) * width + (node * leaves * LEAF + number)[None, :]
    weight += read_column[:, None].to(tl.int64) * width + (node * leaves * LEAF + number)[None, :]
    x_scale += read_row * x_scale_stride + node * leaves * x_scale_step
    weight_scale += place // rows_of_group * TILE // BLOCK * weight_scale_stride + node * leaves * weight_scale_step
    slots = (tl.zeros([TILE, TILE], tl.float32),) * LEVELS
    for leaf in range(leaves):
        if WHOLE:
            left, right = tl.load(x), tl.load(weight)
        else:
            inside = ((node * leaves + leaf) * LEAF + number < width)[None, :]
            left, right = tl.load(x, mask=inside, other=0.0), tl.load(weight, mask=inside, other=0.0)
        total = tl.dot(left, right.T, input_precision="ieee")
        if SCALED:
            total *= (tl.load(x_scale) * tl.load(weight_scale))[:, None]
        code = tl.load(merges + leaf)
        total, slots = _add_leaf(total, slots, code & 1, code >> 1, 0, min(LEVELS, 2))
        if code >> 1 >= 2:  # every fourth leaf
            total, slots = _add_leaf(total, slots, code & 1, code >> 1, 2, LEVELS)
        x += LEAF
        weight += LEAF
        x_scale += x_scale_step
        weight_scale += weight_scale_step
    result += (node * tokens + row[:, None]).to(tl.int64) * features + column[None, :]
    tl.store(result, slots[LEVELS - 1], mask=(row[:, None] < tokens) & (column[None, :] < features))


def multiply_nodes(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor | None = None, weight_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the nodes of x . W^T, float32 `[nodes, T, N]`, for `kernels.sums.reference.add`; x `[T, K]` and weight `[N, K]` in BF16,
    float32 or E4M3. E4M3 needs scales float32 `[T, K/128]` and `[N/128, K/128]` of any strides. Raise ValueError for other operands."""
    (tokens, width), features = x.shape, len(weight)
    scales = [scale for scale in (x_scale, weight_scale) if scale is not None]
    scaled, blocks = x.dtype == torch.float8_e4m3fn, -(-width // BLOCK)
    fits = weight.shape == (features, width) and x.dtype == weight.dtype and weight.is_contiguous() and (width % LEAF == 0 or not scaled)
    known = [scale.shape for scale in scales] == ([(tokens, blocks), (-(-features // BLOCK), blocks)] if scaled else [])
    if not (fits and known) or x.dtype not in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in (x, weight, *scales))
        raise ValueError(f"the tree kernel does not support {shapes}")
    x, leaves = x.contiguous(), -(-width // LEAF)
    tiles = -(-tokens // TILE) * -(-features // TILE)
    nodes = count_nodes(leaves, tiles)
    result = torch.empty(nodes, tokens, features, dtype=torch.float32, device=x.device)
    if not tiles:
        return result
    x_scale, weight_scale = scales or (result[0], result[0])
    multiply_tile[(tiles, nodes)](
        x, weight, result, x_scale, weight_scale, _merge_table(leaves, x.device), tokens, features, width, leaves // nodes,
        *x_scale.stride(), *weight_scale.stride(), SCALED=scaled, WHOLE=width % LEAF == 0,
        LEVELS=max((leaves // nodes - 1).bit_length(), 1), TILE=TILE, GROUP=GROUP, LEAF=LEAF, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip
    return result


def count_nodes(leaves: int, tiles: int) -> int:
    """Return into how many equal nodes the sum is split, so that few tokens keep the GPU busy."""
    nodes = 1
    while nodes < MAX_NODES and nodes * tiles < _ENOUGH_PROGRAMS and leaves % (2 * nodes) == 0:
        nodes *= 2
    return nodes


@functools.cache
def _merge_table(leaves: int, device: torch.device) -> torch.Tensor:
    """Return int32 `[leaves]`: level of a leaf + 2 * level that it completes. A node's table is a prefix of it, so one table serves any
    number of tokens. It is created on first use, before a CUDA graph is captured."""
    return torch.tensor([level + 2 * completed for level, completed in list_merges(leaves)], dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["parts", "results"])
def add_parts(partials, total, parts, results, ADDED: tl.constexpr):
    """One program per ADDED of the `results` of `total` from `partials` [parts, results]. Each result is added alone, so its order depends
    on no other."""
    at = tl.program_id(0).to(tl.int64) * ADDED + tl.arange(0, ADDED)
    inside = at < results
    value = tl.load(partials + at, mask=inside, other=0.0).to(tl.float32)
    for _ in range(1, parts):
        partials += results
        value += tl.load(partials + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


def add_ranks(parts: torch.Tensor) -> torch.Tensor:
    """Compute `kernels.sums.reference.add_ranks`."""
    parts, total = parts.contiguous(), torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    if total.numel():
        add_parts[(triton.cdiv(total.numel(), ADDED),)](parts, total, len(parts), total.numel(), ADDED=ADDED, **ADD_LAUNCH)
    return total


@triton.jit(do_not_specialize=["count"])
def add_tall_columns(rows, total, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program per COLUMNS columns of `rows` float32 [count, width]."""
    column, sums = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + column[None, :]
        sums += tl.load(rows + at, mask=(row < count)[:, None] & (column < width)[None, :], other=0.0)
    tl.store(total + column, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=column < width)


def add_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum `[width]` of many contiguous rows float32 `[n, width]`, such as parts of a weight's gradient. torch's own sum takes
    several times as long as reading them."""
    total = torch.empty(rows.shape[1], dtype=dtype, device=rows.device)
    add_tall_columns[(triton.cdiv(len(total), _TALL["COLUMNS"]),)](rows, total, len(rows), len(total), **_TALL, **ADD_LAUNCH)
    return total
