"""SGLang's FlashAttention 3 in one split, and this project's attention in splits: prompts in chunks and decoded tokens, from paged keys,
have the bits of whole packed sequences, for the widths of heads that trainer and engine share (`kernels.attention.requirements`) and for
those that they could share. On a CPU, a stand-in that attends exactly, or in an order that follows the queries, checks the test itself."""

import itertools

import pytest
import torch
from support.kernel_tests import random

from megatron_rl.kernels.attention import flash3, reference
from megatron_rl.kernels.split_attention import SPLIT, Sequences, pack
from megatron_rl.kernels.split_attention import reference as split_attention

LENGTHS = {"cuda": (4097, 300, 64, 1), "cpu": (70, 33, 1)}
CHUNKS = (1, 40, 128)


class FlashAttention3:
    """Keys lie in pages of one token, as in SGLang."""

    def __init__(self):
        from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._packed, self._cached = flash_attn_varlen_func, flash_attn_with_kvcache

    def attend_packed(self, q, k, v, starts, longest):
        """Return `[t, heads, d]`, as a trainer would compute it."""
        return self._packed(q, k, v, starts, starts, max(longest, 2), max(longest, 2), causal=True, num_splits=1)

    def attend_cached(self, q, k, v, count):
        """Return `[n, heads, d]` of the last n of `count` tokens of a sequence, as an engine computes it. At least two queries are
        announced: for one, FlashAttention 3 chooses other tiles."""
        pages = torch.randperm(len(k), generator=torch.Generator().manual_seed(0)).int().to(q.device)
        k_cache, v_cache = (torch.empty_like(x).index_copy_(0, pages.long(), x).unsqueeze(1) for x in (k, v))
        starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        lengths = torch.tensor([count], dtype=torch.int32, device=q.device)
        options = {"cache_seqlens": lengths, "page_table": pages[None], "cu_seqlens_q": starts, "max_seqlen_q": max(len(q), 2)}
        return self._cached(q, k_cache, v_cache, **options, causal=True, num_splits=1)


class Splits:
    """`kernels.split_attention`, with slots of one token in any order."""

    def attend_packed(self, q, k, v, starts, longest):
        return split_attention.attend(q, k, v, pack(starts, longest, len(q)), q.shape[-1] ** -0.5)[0]

    def attend_cached(self, q, k, v, count):
        slots = torch.randperm(len(k), generator=torch.Generator().manual_seed(0)).int().to(q.device)
        caches = (torch.empty_like(x).index_copy_(0, slots.long(), x) for x in (k, v))
        starts, lengths, row = (torch.tensor(values, device=q.device) for values in ([0, len(q)], [count], [0]))
        splits = -(-len(k) // SPLIT) if len(q) == 1 else 0
        return split_attention.attend(q, *caches, Sequences(starts, lengths, row, slots, 0, len(q), splits), q.shape[-1] ** -0.5)[0]


class Exact:
    """The same in float64, rounded to BF16. With `rounds`, the weights of a single query are rounded, too."""

    def __init__(self, rounds=False):
        self._rounds = rounds

    def attend_packed(self, q, k, v, starts, longest):
        bounds = starts.tolist()
        spans = [slice(*pair) for pair in itertools.pairwise(bounds)]
        return torch.cat([self.attend_cached(q[span], k[span], v[span], span.stop - span.start) for span in spans])

    def attend_cached(self, q, k, v, count):
        group = q.shape[1] // k.shape[1]
        keys, values = (x[:count].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[-1] ** -0.5
        last = torch.arange(count - len(q), count)
        weights = scores.masked_fill(torch.arange(count) > last[:, None], -torch.inf).softmax(-1)
        if self._rounds and len(q) == 1:
            weights = weights.bfloat16().double()
        return torch.einsum("hqk,khd->qhd", weights, values).bfloat16()


def count_different_tokens(library, heads, groups, dim, lengths, device):
    """Return by way of computation the number of tokens of which a bit differs from the packed sequences', of all tokens compared."""
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    q, k, v = (random(sum(lengths), count, dim, seed=count, dtype=torch.bfloat16).to(device) for count in (heads, groups, groups))
    whole, different = library.attend_packed(q, k, v, starts, max(lengths)), {"another packing": 0} | {f"chunks of {n}": 0 for n in CHUNKS}
    for start, length in zip(starts.tolist(), lengths, strict=False):
        own = slice(start, start + length)
        alone = library.attend_packed(q[own], k[own], v[own], torch.tensor([0, length], device=device).int(), length)
        different["another packing"] += int((alone != whole[own]).flatten(1).any(1).sum())
        for size in CHUNKS:  # every chunk of a short sequence, 50 chunks of a long one; of one token: decoded tokens
            ends = range(length, 0, -size)
            for end in ends[:: max(1, len(ends) // 50)]:
                rows = slice(start + max(end - size, 0), start + end)
                found = library.attend_cached(q[rows], k[own], v[own], end)
                different[f"chunks of {size}"] += int((found != whole[rows]).flatten(1).any(1).sum())
    return different


@pytest.mark.gpu
@pytest.mark.parametrize(
    "library, heads, groups, dim",
    [
        *((FlashAttention3, *heads) for heads in ((32, 8, 128), (8, 8, 128), (16, 2, 64), (8, 2, 256))),
        *((Splits, *heads) for heads in ((16, 2, 64), (14, 2, 64), (32, 8, 128), (8, 2, 256))),
    ],
)
def test_a_chunk_has_the_bits_of_packed_sequences(library, heads, groups, dim, record_property):
    found = count_different_tokens(library(), heads, groups, dim, LENGTHS["cuda"], "cuda")
    record_property(f"{heads} heads of {dim}, {groups} groups: tokens that differ", found)
    assert not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("dim, window, has_sinks", [(64, 0, False), (64, 128, True), (128, 0, True), (256, 0, False)])
def test_splits_and_their_gradients_are_near_float64(dim, window, has_sinks, record_property):
    lengths = (2500, 300, 1)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v, gradient = (random(sum(lengths), n, dim, seed=n + s, dtype=torch.bfloat16).cuda() for s, n in enumerate((8, 2, 2, 8)))
    inputs = [x.requires_grad_() for x in (q, k, v, *([random(8, seed=9).cuda()] if has_sinks else []))]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    output = split_attention.attend_packed(*inputs[:3], starts, max(lengths), None, *(inputs[3:] or [None]), window)
    formula = split_attention.attend.__wrapped__
    wanted, _ = formula(*doubles[:3], pack(starts, max(lengths), len(q)), dim**-0.5, *(doubles[3:] or [None]), window)
    pairs = [(output, wanted)]
    pairs += zip(torch.autograd.grad(output, inputs, gradient), torch.autograd.grad(wanted, doubles, gradient.double()), strict=True)
    for name, (own, exact) in zip(("result", "q", "k", "v", "sinks"), pairs, strict=False):
        error = float((own.detach().double() - exact.detach()).norm() / exact.detach().norm())
        record_property(f"heads of {dim}, window {window}, sinks {has_sinks}: {name}: relative error", error)
        assert error < 2e-2, name


@pytest.mark.gpu
def test_the_trainers_attention_and_its_gradients(record_property):
    """The output is that of one split; gradients are FlashAttention 2's, from FlashAttention 3's output and log-sums."""
    lengths = (1500, 300, 1)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    *inputs, gradient = (random(sum(lengths), n, 128, seed=n + s, dtype=torch.bfloat16).cuda() for s, n in enumerate((32, 8, 8, 32)))
    output = flash3.attend(*(x.requires_grad_() for x in inputs), starts, max(lengths), None)
    assert torch.equal(output, FlashAttention3().attend_packed(*(x.detach() for x in inputs), starts, 1500))
    found = torch.autograd.grad(output, inputs, gradient)
    for other, limit in ((reference.flash_attention(*inputs, starts, max(lengths), None), 2e-2), (exact(inputs, lengths), 2e-2)):
        for name, a, b in zip("qkv", found, torch.autograd.grad(other, inputs, gradient.to(other.dtype)), strict=True):
            error = float((a.double() - b.double()).norm() / b.double().norm())
            record_property(f"gradient of {name}: relative error", error)
            assert error < limit, name


def exact(inputs, lengths):
    return reference.sdpa_per_sequence(*(x.float() for x in inputs), list(lengths), None)


def test_slots_of_the_cache_are_read():
    q, k, v = (random(33, count, 16, seed=count) for count in (4, 2, 2))
    whole = Splits().attend_packed(q, k, v, torch.tensor([0, 33]), 33)
    for first, end in ((32, 33), (5, 20)):
        torch.testing.assert_close(Splits().attend_cached(q[first:end], k, v, end), whole[first:end], rtol=1e-5, atol=1e-5)


def test_the_comparison_itself():
    assert not any(count_different_tokens(Exact(), 4, 2, 16, LENGTHS["cpu"], "cpu").values())
    planted = count_different_tokens(Exact(rounds=True), 4, 2, 16, LENGTHS["cpu"], "cpu")
    assert planted["chunks of 1"] > 50 and planted["chunks of 128"] == 0
