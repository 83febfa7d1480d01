"""The Triton kernels of `kernels.split_attention.reference`.

Blocks of `KEYS` keys begin at multiples of `KEYS`, and splits of `SPLIT` keys at multiples of `SPLIT`. Each split has its own maximum, sum,
and weighted values in FP32, which are merged from the first split to the last. A block or split without a key that the row sees multiplies
by 1 and adds 0. Tiles always have `ROWS` rows, even for a single decoded token, so all products have one matrix instruction, in which rows
do not mix.

Decoded tokens have few rows and many keys, so there a program computes one split, and `merge_splits` merges them by the same operations.
"""

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.attention.requirements import takes_splits
from megatron_rl.kernels.gates.triton import align, align_rows
from megatron_rl.kernels.split_attention import KEYS, ROWS, SPLIT, Sequences

LOG2_E = 1.4426950408889634  # of e, to base 2
_LOG2_E, _LN_2 = tl.constexpr(LOG2_E), tl.constexpr(0.6931471805599453)


@triton.jit
def _merge(top, total, values, other_top, other_total, other_values):
    """Return (maximum, sum, weighted values [..., WIDTH]) of the keys of both."""
    both = tl.maximum(top, other_top)
    base = tl.where(both == float("-inf"), 0.0, both)
    own, other = tl.exp2(top - base), tl.exp2(other_top - base)
    return both, total * own + other_total * other, values * tl.expand_dims(own, -1) + other_values * tl.expand_dims(other, -1)


@triton.jit
def _sum_split(
    q, k, v, slots, position, first, last, scale, window, WINDOWED: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return (maximum, sum, weighted values) of rows q [ROWS, WIDTH] over the keys from `first`, a multiple of KEYS, to before `last`."""
    number, column = tl.arange(0, KEYS), tl.arange(0, WIDTH)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    for block in range(first, last, KEYS):
        place = block + number
        there = place < last
        slot = tl.load(slots + place, mask=there, other=0).to(tl.int64) * (GROUPS * WIDTH)
        keys = tl.load(k + slot[:, None] + column[None, :], mask=there[:, None], other=0.0)
        seen = place[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (place[None, :] > position[:, None] - window)
        scores = tl.where(seen, tl.dot(q, tl.trans(keys)) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, factor = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        own = tl.load(v + slot[:, None] + column[None, :], mask=there[:, None], other=0.0)
        values = tl.dot(weights.to(own.dtype), own, values * factor[:, None])
        top = new
    return top, total, values


@triton.jit
def _find_splits(first, last, window, WINDOWED: tl.constexpr, SPLIT: tl.constexpr):
    """Return the first key, and the first and last split, that rows at positions `first` to `last` see."""
    lowest = tl.maximum(first - window + 1, 0) if WINDOWED else first * 0
    return lowest, lowest // SPLIT, last // SPLIT


@triton.jit(do_not_specialize=["tokens", "row_stride", "splits", "window"])
def attend_rows(
    q, k, v, out, log_sums, sinks, query_starts, key_counts, rows, slots, tokens, row_stride, query_stride, splits, window,
    scale, WINDOWED: tl.constexpr, SINKS: tl.constexpr, PARTIAL: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for ROWS queries of the heads that share a head of keys, of a sequence; if PARTIAL, for one split of its keys: `out`
    is then float32 [tokens, heads, splits, WIDTH], and `log_sums` float32 [2, tokens, heads, splits] takes maxima and sums."""
    tile, sequence = tl.program_id(0), tl.program_id(2)
    group = tl.program_id(1) % GROUPS
    start = tl.load(query_starts + sequence).to(tl.int64)
    count, keys = (tl.load(query_starts + sequence + 1) - start).to(tl.int32), tl.load(key_counts + sequence).to(tl.int32)
    if tile * ROWS >= count * GROUP:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.minimum(row // GROUP, count - 1)  # rows of a tile beyond the last query repeat it
    position, head = keys - count + token, group * GROUP + row % GROUP
    first, last = keys - count + tile * ROWS // GROUP, keys - count + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, count - 1)
    lowest, split, end = _find_splits(first, last, window, WINDOWED, SPLIT)
    column, heads = tl.arange(0, WIDTH), GROUPS * GROUP
    queries = tl.load(q + ((start + token) * query_stride + head * WIDTH)[:, None] + column[None, :])
    own_slots = slots + tl.load(rows + sequence).to(tl.int64) * row_stride
    k += group * WIDTH
    v += group * WIDTH
    if PARTIAL:
        split += tl.program_id(1) // GROUPS
        if split > end:
            return
        top, total, values = _sum_split(
            queries, k, v, own_slots, position, tl.maximum(split * SPLIT, lowest // KEYS * KEYS),
            tl.minimum(split * SPLIT + SPLIT, last + 1), scale, window, WINDOWED, GROUPS, WIDTH, ROWS, KEYS,
        )  # fmt: skip
        place, inside = ((start + token) * heads + head) * splits + split, row < count * GROUP
        tl.store(out + place[:, None] * WIDTH + column[None, :], values, mask=inside[:, None])
        tl.store(log_sums + place, top, mask=inside)
        tl.store(log_sums + tokens.to(tl.int64) * heads * splits + place, total, mask=inside)
    else:
        if SINKS:
            top, total = tl.load(sinks + head).to(tl.float32) * _LOG2_E, tl.full([ROWS], 1.0, tl.float32)
        else:
            top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, WIDTH], tl.float32)
        for number in range(split, end + 1):
            other_top, other_total, other_values = _sum_split(
                queries, k, v, own_slots, position, tl.maximum(number * SPLIT, lowest // KEYS * KEYS),
                tl.minimum(number * SPLIT + SPLIT, last + 1), scale, window, WINDOWED, GROUPS, WIDTH, ROWS, KEYS,
            )  # fmt: skip
            top, total, values = _merge(top, total, values, other_top, other_total, other_values)
        tile += (tl.load(query_starts + sequence, volatile=True) - start).to(tl.int32)  # 0: the addresses are computed again, not kept
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head, inside = tl.minimum(row // GROUP, count - 1), group * GROUP + row % GROUP, row < count * GROUP
        result = ((start + token) * heads + head) * WIDTH
        tl.store(out + result[:, None] + column[None, :], (values / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
        tl.store(log_sums + head.to(tl.int64) * tokens + start + token, (top + tl.log2(total)) * _LN_2, mask=inside)


@triton.jit(do_not_specialize=["tokens", "splits", "window"])
def merge_splits(
    partial, statistics, out, log_sums, sinks, query_starts, key_counts, tokens, splits, window, WINDOWED: tl.constexpr,
    SINKS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for a head of the only query of a sequence; see `attend_rows` for `partial` and `statistics`."""
    head, heads, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    token, position = tl.load(query_starts + sequence).to(tl.int64), tl.load(key_counts + sequence).to(tl.int32) - 1
    _, split, end = _find_splits(position, position, window, WINDOWED, SPLIT)
    one, column = tl.arange(0, 1), tl.arange(0, WIDTH)
    if SINKS:
        top, total = tl.load(sinks + head + one).to(tl.float32) * _LOG2_E, tl.full([1], 1.0, tl.float32)
    else:
        top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    values = tl.zeros([1, WIDTH], tl.float32)
    for number in range(split, end + 1):
        place = (token * heads + head) * splits + number + one
        other = tl.load(partial + place[:, None] * WIDTH + column[None, :])
        other_total = tl.load(statistics + tokens.to(tl.int64) * heads * splits + place)
        top, total, values = _merge(top, total, values, tl.load(statistics + place), other_total, other)
    result = (token * heads + head) * WIDTH + column
    tl.store(out + result[None, :], (values / total[:, None]).to(out.dtype.element_ty))
    tl.store(log_sums + head.to(tl.int64) * tokens + token + one, (top + tl.log2(total)) * _LN_2)


def choose_launch(width: int) -> dict[str, int | bool]:
    """Return the launch options for heads of `width`. Without fused multiply-add, both ways of merging splits round alike."""
    return {"num_warps": 8 if width > 128 else 4, "num_stages": 2, "enable_fp_fusion": False}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.split_attention.reference.attend`. Raise ValueError for shapes and dtypes that the kernel does not take."""
    (tokens, heads, width), groups, splits = query.shape, key.shape[1], max(sequences.splits, 1)
    fits = key.shape == value.shape and key.shape[2] == width and heads % groups == 0 and takes_splits(width, window)
    if not fits or len({x.dtype for x in (query, key, value)}) > 1 or (query.is_cuda and query.dtype != torch.bfloat16):
        found = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (query, key, value))
        raise ValueError(f"attention in splits does not take query, key, value of {found}, with a window of {window}")
    query, key, value = align_rows(query), align(key), align(value)
    out, log_sums = query.new_empty(query.shape), torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    beside, starts, counts = out if sinks is None else sinks.contiguous(), sequences.starts, sequences.key_counts
    kind = {"WINDOWED": window > 0, "SINKS": sinks is not None, "WIDTH": width, "SPLIT": SPLIT}
    partial, statistics = out, log_sums
    if sequences.splits:
        partial = torch.empty(tokens, heads, splits, width, dtype=torch.float32, device=query.device)
        statistics = torch.empty(2, tokens, heads, splits, dtype=torch.float32, device=query.device)
    if tokens:
        attend_rows[(triton.cdiv(sequences.longest * (heads // groups), ROWS), groups * splits, len(counts))](
            query, key, value, partial, statistics, beside, starts, counts, sequences.rows, sequences.slots, tokens, sequences.row_stride,
            query.stride(0), splits, window, scale * LOG2_E, PARTIAL=sequences.splits > 0, GROUP=heads // groups, GROUPS=groups, ROWS=ROWS,
            KEYS=KEYS, **kind, **choose_launch(width),
        )  # fmt: skip
    if tokens and sequences.splits:
        merge_splits[(heads, len(counts))](
            partial, statistics, out, log_sums, beside, starts, counts, tokens, splits, window, **kind, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out, log_sums
