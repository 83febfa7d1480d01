"""The Triton kernels of `kernels.heads.reference`."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.heads import Heads, Norms
from megatron_rl.kernels.quantize.triton import align
from megatron_rl.kernels.rope.reference import Rotation
from megatron_rl.kernels.sums.triton import add_rows

_TOKENS = 32  # tokens of a program, which computes one head of each
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}  # multiply-adds are fused only where the kernel calls `tl.fma`


@triton.jit
def _load_pairs(source, first, second, inside):
    return tl.load(source + first, mask=inside, other=0.0).to(tl.float32), tl.load(source + second, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def rotate_head_tile(
    query_source, key_source, query, key, of_query, of_key, cos, sin, positions, tokens, query_stride, key_stride, query_group, key_group,
    eps, GROUPS: tl.constexpr, QUERIES: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, NORMS: tl.constexpr,
    ROTATES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per TOKENS tokens and query or key head. Tokens and groups of the sources are a stride apart, a group's queries lie next
    to each other; results are contiguous."""
    token, head = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    group, number = head // (QUERIES + 1), head % (QUERIES + 1)
    pair = tl.arange(0, PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else PAIRS)
    is_there = token < tokens
    inside = is_there[:, None]
    if number == QUERIES:
        source = key_source + (token * key_stride + group * key_group)[:, None]
        target = key + (token * GROUPS + group)[:, None] * (2 * PAIRS)
    else:
        source = query_source + (token * query_stride + group * query_group + number * (2 * PAIRS))[:, None]
        target = query + (token * (GROUPS * QUERIES) + group * QUERIES + number)[:, None] * (2 * PAIRS)
    a, b = _load_pairs(source, first[None, :], second[None, :], inside)
    if NORMS:
        weight = of_key if number == QUERIES else of_query
        scale = tl.rsqrt((tl.sum(a * a + b * b, axis=1) / (2 * PAIRS)) + eps)[:, None]
        a = (a * scale * tl.load(weight + first).to(tl.float32)[None, :]).to(query.dtype.element_ty).to(tl.float32)
        b = (b * scale * tl.load(weight + second).to(tl.float32)[None, :]).to(query.dtype.element_ty).to(tl.float32)
    if ROTATES:
        row = tl.load(positions + token, mask=is_there, other=0).to(tl.int64)[:, None] * PAIRS + pair[None, :]
        c, s = tl.load(cos + row), tl.load(sin + row)
        turned = tl.fma(a, c, -(b * s))
        b = tl.fma(a, s, b * c)
        a = turned
    tl.store(target + first[None, :], a.to(query.dtype.element_ty), mask=inside)
    tl.store(target + second[None, :], b.to(query.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def differentiate_head_tile(
    dq, dk, dv, mixed, result, of_query, of_key, of_weights, cos, sin, positions, tokens, eps, GROUPS: tl.constexpr,
    QUERIES: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, NORMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per TOKENS tokens and head, including value heads. `of_weights` float32 [programs, GROUPS (QUERIES + 1), 2 PAIRS]."""
    token, head = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    group, number = head // (QUERIES + 2), head % (QUERIES + 2)
    pair = tl.arange(0, PAIRS)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else PAIRS)
    is_there = token < tokens
    inside = is_there[:, None]
    if number < QUERIES:
        source = dq + (token * (GROUPS * QUERIES) + group * QUERIES + number)[:, None] * (2 * PAIRS)
    else:
        source = (dk if number == QUERIES else dv) + (token * GROUPS + group)[:, None] * (2 * PAIRS)
    da, db = _load_pairs(source, first[None, :], second[None, :], inside)
    at = (token * (GROUPS * (QUERIES + 2)) + head)[:, None] * (2 * PAIRS)
    if number <= QUERIES:
        row = tl.load(positions + token, mask=is_there, other=0).to(tl.int64)[:, None] * PAIRS + pair[None, :]
        c, s = tl.load(cos + row), tl.load(sin + row)
        turned = tl.fma(da, c, db * s).to(result.dtype.element_ty).to(tl.float32)
        db = tl.fma(da, -s, db * c).to(result.dtype.element_ty).to(tl.float32)
        da = turned
        if NORMS:
            a, b = _load_pairs(mixed + at, first[None, :], second[None, :], inside)
            scale = tl.rsqrt((tl.sum(a * a + b * b, axis=1) / (2 * PAIRS)) + eps)[:, None]
            a, b = a * scale, b * scale
            sums = of_weights + (tl.program_id(0).to(tl.int64) * (GROUPS * (QUERIES + 1)) + group * (QUERIES + 1) + number) * (2 * PAIRS)
            tl.store(sums + first, tl.sum(da * a, axis=0))
            tl.store(sums + second, tl.sum(db * b, axis=0))
            weight = of_key if number == QUERIES else of_query
            da, db = da * tl.load(weight + first).to(tl.float32)[None, :], db * tl.load(weight + second).to(tl.float32)[None, :]
            mean = (tl.sum(da * a + db * b, axis=1) / (2 * PAIRS))[:, None]
            da, db = scale * (da - a * mean), scale * (db - b * mean)
    tl.store(result + at + first[None, :], da.to(result.dtype.element_ty), mask=inside)
    tl.store(result + at + second[None, :], db.to(result.dtype.element_ty), mask=inside)


def rotate_heads(mixed: torch.Tensor, heads: Heads, norms: Norms) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.heads.reference.rotate_heads`. Raise ValueError if shapes do not match."""
    dim = _check(mixed, heads)
    by_group = align(mixed).view(len(mixed), heads.groups, heads.queries + 2, dim)
    return _launch(by_group[:, :, :-2], by_group[:, :, -2:-1], norms, heads.rotation, heads.eps)


def turn_heads(query: torch.Tensor, key: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.heads.reference.turn_heads`. Raise ValueError if shapes do not match."""
    return _launch(*_group(query, key), None, rotation, 0.0)


def normalize_heads(query: torch.Tensor, key: torch.Tensor, norms: Norms, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.heads.reference.normalize_heads`, in the order of sums of `rotate_heads`. Raise ValueError if shapes do not match or
    the width of a head is no power of two."""
    return _launch(*_group(query, key), norms, None, eps)


def normalize_and_turn_heads(
    query: torch.Tensor, key: torch.Tensor, norms: Norms, eps: float, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `kernels.heads.reference.normalize_and_turn_heads`. Raise ValueError as `normalize_heads`."""
    return _launch(*_group(query, key), norms, rotation, eps)


def _group(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views `[t, groups, queries, d]` and `[t, groups, 1, d]`. Raise ValueError if shapes do not match."""
    fits = query.dim() == key.dim() == 3 and query.shape[::2] == key.shape[::2] and query.shape[1] % key.shape[1] == 0
    if not fits or query.stride(1) != query.shape[2] or query.shape[2] & (query.shape[2] - 1):
        raise ValueError(f"queries {list(query.shape)} and keys {list(key.shape)} do not match, or the width of a head is no power of two")
    return align(query).unflatten(1, (key.shape[1], -1)), align(key).unsqueeze(2)


def _launch(
    query: torch.Tensor, key: torch.Tensor, norms: Norms, rotation: Rotation | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, groups, queries, dim), unused = query.shape, query.new_empty(0)
    results = query.new_empty(tokens, groups * queries, dim), query.new_empty(tokens, groups, dim)
    if tokens:
        rotate_head_tile[(triton.cdiv(tokens, _TOKENS), groups * (queries + 1))](
            query, key, *results, *map(align, norms or (unused, unused)), *(rotation or (unused,) * 3)[:3], tokens, query.stride(0),
            key.stride(0), query.stride(1), key.stride(1), eps, GROUPS=groups, QUERIES=queries, PAIRS=dim // 2,
            INTERLEAVED=rotation is not None and rotation.interleaved, NORMS=norms is not None, ROTATES=rotation is not None,
            TOKENS=_TOKENS, **LAUNCH,
        )  # fmt: skip
    return results


def differentiate_heads(gradients: Sequence[torch.Tensor], mixed: torch.Tensor, heads: Heads, norms: Norms) -> tuple[torch.Tensor, Norms]:
    """Compute `kernels.heads.reference.differentiate_heads`. Raise ValueError if shapes do not match."""
    dim, (dq, dk, dv) = _check(mixed, heads), (gradient.contiguous() for gradient in gradients)
    tiles = triton.cdiv(len(mixed), _TOKENS)
    result = torch.empty_like(mixed)
    sums = torch.empty(tiles if norms else 0, heads.groups, heads.queries + 1, dim, dtype=torch.float32, device=mixed.device)
    if len(mixed):
        read = mixed.view(len(mixed), heads.groups, -1)[:, :, :-dim] if norms else mixed[:0]
        differentiate_head_tile[tiles, heads.groups * (heads.queries + 2)](
            dq, dk, dv, read, result, *(norms or (mixed[:0], mixed[:0])), sums, *heads.rotation[:3], len(mixed), heads.eps,
            **_constants(heads, norms),
        )  # fmt: skip
    if norms is None:
        return result, None
    of_heads = add_rows(sums.flatten(1), torch.float32).view(sums.shape[1:])
    return result, (of_heads[:, :-1].sum((0, 1)).to(norms[0].dtype), of_heads[:, -1].sum(0).to(norms[1].dtype))


def _check(mixed: torch.Tensor, heads: Heads) -> int:
    """Return the width of a head. Raise ValueError if shapes do not match."""
    dim, rotation = 2 * heads.rotation.cos.shape[1], heads.rotation
    fits = mixed.shape == (len(rotation.positions), heads.groups * (heads.queries + 2) * dim) and dim & (dim - 1) == 0
    if not fits or not mixed.is_contiguous():
        raise ValueError(f"mixed {list(mixed.shape)}, {heads.groups} groups of {heads.queries} + 2 heads of width {dim} do not match")
    return dim


def _constants(heads: Heads, norms: Norms) -> dict[str, Any]:
    pairs, interleaved = heads.rotation.cos.shape[1], heads.rotation.interleaved
    of_heads = {"GROUPS": heads.groups, "QUERIES": heads.queries, "PAIRS": pairs, "INTERLEAVED": interleaved}
    return {**of_heads, "NORMS": norms is not None, "TOKENS": _TOKENS, **LAUNCH}
