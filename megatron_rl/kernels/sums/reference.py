"""Sums in the order of a fixed binary tree, so that their bits do not depend on how tensor-parallel ranks share the addends.

A row-parallel layer's sum over K numbers has ceil(K / 128) leaves, each the product of 128 numbers of a row and of a weight. A node of n
leaves adds the sum of its first ceil(n / 2) leaves and the sum of the rest. All sums are FP32; the root is rounded once to the dtype of the
layer. If `tp` ranks, a power of two, have equally many whole leaves, the leaves of a rank are a node: the rank sends one number per result,
and tp 1, 2, 4 and 8 give the same bits. The method follows the tree-based invariant kernels of arXiv 2511.17826.

A softmax over the vocabulary sums its exponentials in equal parts, whose number is a power of two, and adds the parts by the tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.batch_invariant import apply_with_min_rows, bf16_operands, run_products_in_parts
from parallel.row_sums import GATHERED_WHOLE, LEAF, halve

MAX_VOCABULARY_PARTS = 64
_TILE_ROWS, _TILE_COLUMNS = 512, 256  # tile of a node's results that fits in the cache of a core
_FEW_ROWS = 64  # with up to this many rows, columns are not tiled: reading the weight dominates the time of a decoded token


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x . W^T, float32 `[..., N]`, by the tree over this rank's leaves; x `[..., K]` and weight `[N, K]` in BF16 or float32. The
    bits of a row do not depend on other rows, but differ between CPU and GPU."""
    if x.is_cuda:
        from megatron_rl.kernels.sums.triton import multiply_nodes

        return add(multiply_nodes(x.reshape(-1, x.shape[-1]), weight).unbind()).unflatten(0, x.shape[:-1])
    with bf16_operands(len(weight)) if x.dtype == torch.bfloat16 else nullcontext():
        return _multiply(x.float(), weight)


def multiply_blocks(x: tuple[torch.Tensor, ...], weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return `multiply` of (E4M3 data `[T, K]`, float32 scales `[T, K/128]`) and (data `[N, K]`, scales `[N/128, K/128]`) on a GPU, with
    scales of any strides. Every leaf is a scaled product of the data."""
    from megatron_rl.kernels.sums.triton import multiply_nodes

    (x_data, x_scale), (weight_data, weight_scale) = x, weight
    return add(multiply_nodes(x_data, weight_data, x_scale, weight_scale).unbind())


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `multiply` of float32 x. Threads share the tiles of many rows, each of which has the bits of one thread."""

    def multiply_rows(rows: torch.Tensor) -> torch.Tensor:
        if len(rows) <= _FEW_ROWS:
            return _multiply_node(rows, weight)
        result, count = rows.new_empty(len(rows), len(weight)), max(len(rows) // _TILE_ROWS, 1)
        tiles = [*zip(rows.detach().tensor_split(count), result.tensor_split(count), strict=True)]
        for columns, part in _cut_columns(weight.detach()):

            def multiply_tiles(own: slice, columns: slice = columns, part: torch.Tensor = part) -> None:
                for tile, into in tiles[own]:
                    into[:, columns] = _multiply_node(tile, part)

            run_products_in_parts(multiply_tiles, count)
        return result

    return apply_with_min_rows(multiply_rows, x)


def _cut_columns(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Return tiles of at least `_TILE_COLUMNS` results with their float32 weights."""
    starts = range(0, len(weight), _TILE_COLUMNS)[: max(len(weight) // _TILE_COLUMNS, 1)]
    slices = map(slice, starts, [*starts[1:], len(weight)])
    return ((columns, weight[columns].float()) for columns in slices)


def _multiply_node(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    leaves = -(-x.shape[1] // LEAF)
    if leaves <= 1:
        return x @ weight.float().t()  # a leaf is converted to FP32 in the core's cache, where a whole weight would not fit
    cut = halve(leaves) * LEAF
    return _multiply_node(x[:, :cut], weight[:, :cut]).add_(_multiply_node(x[:, cut:], weight[:, cut:]))


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of equal nodes, in order. The parts are not changed."""
    if len(parts) == 1:
        return parts[0]
    cut = halve(len(parts))
    return add(parts[:cut]) + add(parts[cut:])


def reduce(partial: torch.Tensor, group: Any, dtype: torch.dtype, collectives: Any = dist) -> torch.Tensor:
    """Return the sum over the ranks of a group of float32 `[T, ...]`, rounded to `dtype`, on every rank. `collectives` has the functions of
    `torch.distributed` for this group."""
    size = group.size()
    if size == 1:
        return partial.to(dtype)
    if partial.numel() <= GATHERED_WHOLE:
        return add(gather(partial, group, collectives).chunk(size)).to(dtype)
    rows = len(partial)
    own = reduce_scatter(F.pad(partial, (0, 0) * (partial.dim() - 1) + (0, -rows % size)), group, dtype, collectives)
    return gather(own, group, collectives)[:rows]


def gather(x: torch.Tensor, group: Any, collectives: Any) -> torch.Tensor:
    """Return x `[n, ...]` of all ranks in order, `[ranks * n, ...]`."""
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    collectives.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(partial: torch.Tensor, group: Any, dtype: torch.dtype, collectives: Any = dist) -> torch.Tensor:
    """Return this rank's part `[T / tp, ...]` of `reduce`. Ranks exchange parts, and each rank adds those of its own rows."""
    received = torch.empty_like(partial, memory_format=torch.contiguous_format)
    collectives.all_to_all_single(received, partial.contiguous(), group=group)
    return add(received.chunk(group.size())).to(dtype)


@with_kernel
def add_ranks(parts: torch.Tensor) -> torch.Tensor:
    """Return the sums of `[parts, T, ...]` in order, added in FP32 and rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def count_vocabulary_parts(vocabulary: int) -> int:
    """Return the number of equal parts of a sum over the vocabulary: the largest power of two that divides it, up to 64."""
    return min(vocabulary & -vocabulary, MAX_VOCABULARY_PARTS)


def sum_vocabulary(values: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the sums `[...]` of a rank's values `[..., vocabulary / tp]`, in no fixed order if the rank does not hold whole parts."""
    part = vocabulary // count_vocabulary_parts(vocabulary)
    if values.shape[-1] % part:
        return values.sum(-1)
    return add(values.unflatten(-1, (-1, part)).sum(-1).unbind(-1))


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of float32 `[n, vocabulary]`, summed by the tree."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - sum_vocabulary(shifted.exp(), logits.shape[-1]).log().unsqueeze(-1)
