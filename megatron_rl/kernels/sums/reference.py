"""Sums in the order of a fixed binary tree, so that their bits do not depend on how tensor-parallel ranks share the addends.

A row-parallel layer's sum over K numbers has ceil(K / 128) leaves, each the product of 128 numbers of a row with 128 of a weight's. A node
of n leaves adds the sum of its first ceil(n / 2) leaves and that of the others. All sums are FP32; the root is rounded once to the layer's
dtype. Among `tp` ranks, tp a power of two, each with as many whole leaves, a rank's leaves are a node (`holds_node`): it sends one number
for each of its results, and tp 1, 2, 4 and 8 give the same bits. After the tree-based invariant kernels of arXiv 2511.17826.

A softmax over the vocabulary adds its exponentials likewise: within equal parts, as many as powers of two divide it into, then by the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.kernels.batch_invariant import apply_with_min_rows, bf16_operands
from parallel.row_sums import GATHERED_WHOLE, LEAF, halve

MAX_VOCABULARY_PARTS = 64
_TILE_ROWS, _TILE_COLUMNS = 512, 256
"""Of a node's results: a core's cache holds some of them."""
_FEW_ROWS = 64
"""Up to which a result has no tiles of columns: a decoded token's time goes into reading the weight."""


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x . W^T, float32 [..., N], by the tree over this rank's leaves; x [..., K] and weight [N, K] in BF16 or float32.

    A row's bits do not depend on the other rows. On a GPU they are those of its tensor cores, not a CPU's.
    """
    if x.is_cuda:
        from megatron_rl.kernels.sums.triton import multiply_nodes

        return add(multiply_nodes(x.reshape(-1, x.shape[-1]), weight).unbind()).unflatten(0, x.shape[:-1])
    with bf16_operands(len(weight)) if x.dtype == torch.bfloat16 else nullcontext():
        return _multiply(x.float(), weight)


def multiply_blocks(x: tuple[torch.Tensor, ...], weight: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return `multiply` of (E4M3 data [T, K], float32 scales [T, K / 128]) and (data [N, K], scales [N / 128, K / 128]), scales of any
    strides, on a GPU: every leaf is a product of the data, scaled."""
    from megatron_rl.kernels.sums.triton import multiply_nodes

    (x_data, x_scale), (weight_data, weight_scale) = x, weight
    return add(multiply_nodes(x_data, weight_data, x_scale, weight_scale).unbind())


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def multiply_rows(rows: torch.Tensor) -> torch.Tensor:
        tiles, parts = _cut_rows(rows), _cut_columns(weight) if len(rows) > _FEW_ROWS else [weight]
        return torch.cat([torch.cat([_multiply_node(tile, part) for tile in tiles]) for part in parts], 1)

    return apply_with_min_rows(multiply_rows, x)


def _cut_rows(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return tiles of at least `_TILE_ROWS` rows, or all rows."""
    return rows.tensor_split(max(len(rows) // _TILE_ROWS, 1))


def _cut_columns(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the float32 weights of tiles of at least `_TILE_COLUMNS` results."""
    starts = range(0, len(weight), _TILE_COLUMNS)[: max(len(weight) // _TILE_COLUMNS, 1)]
    return (weight[start:end].float() for start, end in zip(starts, [*starts[1:], len(weight)], strict=True))


def _multiply_node(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    leaves = -(-x.shape[1] // LEAF)
    if leaves <= 1:
        return x @ weight.float().t()  # a leaf is widened in the core's cache; a whole weight would leave it
    cut = halve(leaves) * LEAF
    return _multiply_node(x[:, :cut], weight[:, :cut]).add_(_multiply_node(x[:, cut:], weight[:, cut:]))


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of equal nodes, in order; the parts stay as they are."""
    if len(parts) == 1:
        return parts[0]
    cut = halve(len(parts))
    return add(parts[:cut]) + add(parts[cut:])


def reduce(partial: torch.Tensor, group: Any, dtype: torch.dtype, collectives: Any = dist) -> torch.Tensor:
    """Return the sum over a group's ranks of float32 [T, ...], rounded to `dtype`, on every rank. `collectives`: what has the functions of
    `torch.distributed` for this group."""
    size = group.size()
    if size == 1:
        return partial.to(dtype)
    if partial.numel() <= GATHERED_WHOLE:
        return add(_gather(partial, group, collectives).chunk(size)).to(dtype)
    rows = len(partial)
    own = reduce_scatter(F.pad(partial, (0, 0) * (partial.dim() - 1) + (0, -rows % size)), group, dtype, collectives)
    return _gather(own, group, collectives)[:rows]


def _gather(x: torch.Tensor, group: Any, collectives: Any) -> torch.Tensor:
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    collectives.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(partial: torch.Tensor, group: Any, dtype: torch.dtype, collectives: Any = dist) -> torch.Tensor:
    """Return this rank's part [T / tp, ...] of `reduce`: each rank sends every other one its part, and adds its own."""
    received = torch.empty_like(partial, memory_format=torch.contiguous_format)
    collectives.all_to_all_single(received, partial.contiguous(), group=group)
    return add(received.chunk(group.size())).to(dtype)


def count_vocabulary_parts(vocabulary: int) -> int:
    """Return into how many equal parts a sum over the vocabulary is cut: the largest power of two that divides it, up to 64."""
    return min(vocabulary & -vocabulary, MAX_VOCABULARY_PARTS)


def sum_vocabulary(values: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the sums [...] of a rank's node of values [..., vocabulary / tp]; of a rank that has no whole parts, in no fixed order."""
    part = vocabulary // count_vocabulary_parts(vocabulary)
    if values.shape[-1] % part:
        return values.sum(-1)
    return add(values.unflatten(-1, (-1, part)).sum(-1).unbind(-1))


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of float32 [n, vocabulary], whose sum goes by the tree."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - sum_vocabulary(shifted.exp(), logits.shape[-1]).log().unsqueeze(-1)
