"""FlashAttention 3 in the trainer: a NumPy model of its order of sums, and a stand-in that checks each argument that decides this order."""

import inspect
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from support.kernel_tests import random
from torch.nn.attention import varlen

from megatron_rl.errors import RunError
from megatron_rl.kernels.attention import flash3, reference
from megatron_rl.rehearsal.kernels import flash_attention

BLOCK, TILE = 128, 64  # keys of a block, query rows of an instruction
LENGTH, HEADS, WIDTH = 300, 2, 8


def attend_in_order(q, k, v, block=BLOCK, splits=1, packed=None):
    """Return float32 `[n, d]`, the attention of the last n of all tokens, by FlashAttention 3's loop as it is read: tiles of query rows,
    blocks of keys that begin at multiples of `block` and are visited from the last that a row of the tile sees to the first, masked by row.
    Rows of a tile beyond the last query are computed, too. Splits divide the blocks evenly and are merged in order. `packed`: number of
    tokens of the sequence, if q, k and v go on with other sequences, which tiles and blocks then read."""
    count, queries = packed or len(k), packed or len(q)
    scale, result = np.float32(np.log2(np.e) * WIDTH**-0.5), []
    for start in range(0, queries, TILE):
        rows = np.zeros((TILE, WIDTH), np.float32)
        rows[: len(q[start : start + TILE])] = q[start : start + TILE]
        last = np.minimum(count - queries + start + np.arange(TILE), count - 1)
        parts = np.array_split(np.arange(last[-1] // block + 1), splits)
        merged = [sum_blocks(rows, k, v, last, [int(n) for n in part], block, scale) for part in parts]
        top = np.max([m for m, _, _ in merged], 0)
        factors = [np.exp2(np.where(m > -np.inf, m - top, -np.inf), dtype=np.float32) for m, _, _ in merged]
        total = sum((f * s for f, (_, s, _) in zip(factors, merged, strict=True)), np.float32(0))
        values = sum((f[:, None] * acc for f, (_, _, acc) in zip(factors, merged, strict=True)), np.float32(0))
        result.append((values / total[:, None])[: queries - start])
    return np.concatenate(result)


def sum_blocks(rows, k, v, last, blocks, block, scale):
    """Return (maximum, sum, weighted values) of the rows over some blocks of keys."""
    top, total, values = np.full(TILE, -np.inf, np.float32), np.zeros(TILE, np.float32), np.zeros((TILE, WIDTH), np.float32)
    for number in reversed(blocks):
        keys, own = (np.zeros((block, WIDTH), np.float32) for _ in "kv")
        part = slice(number * block, min((number + 1) * block, len(k)))
        keys[: len(k[part])], own[: len(k[part])] = k[part], v[part]
        scores = np.stack([keys @ row for row in rows]) * scale  # one row after another, as an instruction keeps them apart
        scores[number * block + np.arange(block) > last[:, None]] = -np.inf
        new = np.maximum(top, scores.max(1))
        base = np.where(new > -np.inf, new, np.float32(0))
        weights, factor = np.exp2(scores - base[:, None]), np.exp2(top - base)
        total = total * factor + weights.sum(1, dtype=np.float32)
        values = values * factor[:, None] + np.stack([own.T @ row for row in weights])
        top = new
    return top, total, values


def different(found, wanted):
    return int((found != wanted).any(1).sum())


def test_chunks_decoded_tokens_and_prefixes_have_the_bits_of_the_whole():
    q, k, v = (random(LENGTH, WIDTH, seed=seed).numpy() for seed in range(3))
    whole = attend_in_order(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(*(torch.from_numpy(x)[None].double() for x in (q, k, v)), is_causal=True)[0]
    np.testing.assert_allclose(whole, exact.numpy(), rtol=1e-4, atol=1e-5)
    for size in (1, 40, 64, 127, 128, 129):
        for end in (size, 64, 65, 127, 128, 129, 255, 256, 257, LENGTH):
            rows = slice(max(end - size, 0), end)
            assert different(attend_in_order(q[rows], k[:end], v[:end]), whole[rows]) == 0, (size, end)
    lengths = (1, 64, 130, 105)
    for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
        own, packed = ([x[start:end] for x in (q, k, v)] for end in (start + length, LENGTH))
        found = attend_in_order(*packed, packed=length)
        assert different(found, attend_in_order(*own)) == 0, f"a sequence of {length} tokens, packed with others behind it"
    alone = slice(299, 300)
    assert different(attend_in_order(q[alone], k, v, block=160), whole[alone]), "the blocks for a single query, heads of 64"
    assert different(attend_in_order(q[alone], k, v, splits=3), whole[alone]), "splits"
    assert different(attend_in_order(q[alone], k[44:], v[44:]), whole[alone]), "blocks that do not begin at multiples of 128"


@pytest.fixture
def library(monkeypatch):
    """The stand-in, which attends exactly; `library.calls` has the arguments by name of each call."""
    fake, signature = ModuleType(flash3.KERNEL), inspect.signature(flash_attention.flash_attn_varlen_func)  # which gpu_packages compares
    fake.calls = []

    def flash_attn_varlen_func(*args, **named):
        given = signature.bind(*args, **named).arguments
        fake.calls.append(given)
        q, k, v, starts = (given[name] for name in ("q", "k", "v", "cu_seqlens_q"))
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and all(x.stride(-1) == 1 for x in (q, k, v))
        assert starts.dtype == torch.int32 and given["cu_seqlens_k"] is starts
        assert given["num_splits"] == 1 and given["causal"], "what is left out has defaults: no window, cap, sinks, pages or scales"
        assert given["max_seqlen_q"] == given["max_seqlen_k"] >= max(2, int(starts.diff().max()))
        output = reference.sdpa_per_sequence(q, k, v, starts.diff().tolist(), given["softmax_scale"])
        assert given["return_softmax_lse"]
        return output, torch.zeros(q.shape[1], len(q)), None, None

    fake.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, flash3.KERNEL, fake)
    return fake


def draw(*lengths, width=128, heads=4, groups=2):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tensors = [random(sum(lengths), count, width, seed=count + n, dtype=torch.bfloat16) for n, count in enumerate((heads, groups, groups))]
    return tensors, starts


def test_the_trainer_passes_what_decides_the_order_and_differentiates_with_the_output_and_log_sums(library, monkeypatch):
    for lengths in ((5, 1, 9), (1, 1)):
        tensors, starts = draw(*lengths)
        for tensor in tensors:
            tensor.requires_grad_()
        output = flash3.attend(*tensors, starts, max(lengths), None)
        wanted = reference.sdpa_per_sequence(*tensors, list(lengths), None)
        assert torch.equal(output, wanted) and library.calls[-1]["softmax_scale"] == 128**-0.5
        parameters, seen = inspect.signature(varlen._varlen_attn_backward._init_fn).parameters, {}

        def differentiate(*args, parameters=parameters, seen=seen):
            seen.update(zip(parameters, args, strict=False))
            return tuple(torch.full_like(x, n) for n, x in enumerate(args[1:4]))

        monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", differentiate)
        output.backward(torch.ones_like(output).transpose(0, 1).contiguous().transpose(0, 1))
        assert [int(x.grad.max()) for x in tensors] == [0, 1, 2]
        assert torch.equal(seen["out"], output) and seen["lse"].shape == (4, sum(lengths)) and seen["grad_out"].is_contiguous()
        assert seen["is_causal"] and seen["max_q"] == seen["max_k"] == max(lengths) and seen["window_size"] == [-1, 0]
        assert seen["cu_seq_q"] is seen["cu_seq_k"] and seen["scale"] == 128**-0.5 and seen["rng_state"].dtype == torch.uint64


@pytest.mark.parametrize("width, dtype", [(64, torch.bfloat16), (256, torch.bfloat16), (128, torch.float16)])
def test_heads_whose_bits_are_not_known_to_agree_are_refused(library, width, dtype):
    tensors, starts = draw(3, width=width)
    with pytest.raises(RunError, match=rf"{dtype}.* heads of {width}" if width == 128 else f"heads of {width}"):
        flash3.attend(*(x.to(dtype) for x in tensors), starts, 3, None)
    assert not library.calls
