"""The kernels on rows that trainer and engine share, in Triton's interpreter: a row alone has the bits that it has among others, a fused
kernel those of separate ones, and the engine's layout of heads those of the trainer's."""

import pytest
import torch
from support.fp8_reference import same_bits
from support.kernel_tests import in_interpreter, random

EPS, SIZES = 1e-6, (1, 15, 16, 17, 33)
CUTS = (slice(0, 1), slice(14, 16), slice(15, 33), slice(32, 33))


@pytest.mark.kernels
@in_interpreter
def test_norms_of_rows_do_not_depend_on_other_rows_nor_on_quantization():
    from megatron_rl.kernels.norm.triton import normalize, quantize_norm
    from megatron_rl.kernels.quantize.triton import quantize_activation

    for width in (128, 384, 2304):
        x, residual = (random(33, width, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
        weight = torch.linspace(-2, 3, width).bfloat16()
        for adds in (residual, None):
            total, statistic, normed = normalize(x, adds, weight, EPS)
            for rows in CUTS:
                part = normalize(x[rows], None if adds is None else adds[rows], weight, EPS)
                assert all(torch.equal(a, b[rows]) for a, b in zip(part, (total, statistic, normed), strict=True))
            misaligned = torch.zeros(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape).copy_(x)
            assert torch.equal(normalize(misaligned, adds, weight, EPS)[2], normed)
            fused = quantize_norm(x, adds, weight, EPS, "pow2", columns=False)
            assert torch.equal(fused[0], total) and torch.equal(fused[1], statistic)
            assert same_bits(fused[2], quantize_activation(normed, "pow2", rows=True, columns=False)[0])


@pytest.mark.kernels
@in_interpreter
def test_heads_of_separate_rows_are_those_of_the_trainers_groups():
    """The engine normalizes and rotates queries and keys in one step or two, from rows [q | k | v]; the trainer in one, from groups."""
    from megatron_rl.kernels.heads import Heads
    from megatron_rl.kernels.heads.triton import normalize_and_turn_heads, normalize_heads, rotate_heads, turn_heads
    from megatron_rl.kernels.rope.reference import Rotation

    groups, queries, dim = 2, 3, 16
    angles = torch.outer(torch.arange(40.0), 1 / 10000 ** (torch.arange(dim // 2) / dim))
    weights = torch.linspace(-1, 2, dim).bfloat16(), torch.linspace(0.5, 2, dim).bfloat16()
    for tokens in SIZES:
        mixed = random(tokens, groups * (queries + 2) * dim, seed=tokens, dtype=torch.bfloat16)
        by_group = mixed.view(tokens, groups, queries + 2, dim)
        parts = by_group[:, :, :queries], by_group[:, :, queries : queries + 1], by_group[:, :, -1:]
        row = torch.cat([part.reshape(tokens, -1) for part in parts], 1)
        q, k = (part.unflatten(1, (-1, dim)) for part in row.split([groups * queries * dim, groups * dim, groups * dim], 1)[:2])
        for interleaved in (False, True):
            rotation = Rotation.from_angles(angles, torch.arange(tokens) % 7, interleaved)
            for norms in (weights, None):
                wanted = rotate_heads(mixed, Heads(groups, queries, rotation, EPS), norms)
                found = turn_heads(*(normalize_heads(q, k, norms, EPS) if norms else (q, k)), rotation)
                assert all(map(torch.equal, found, wanted))
                assert norms is None or all(map(torch.equal, normalize_and_turn_heads(q, k, norms, EPS, rotation), wanted))
                last = rotation._replace(positions=rotation.positions[-1:])
                alone = rotate_heads(mixed[-1:], Heads(groups, queries, last, EPS), norms)
                assert all(torch.equal(a, b[-1:]) for a, b in zip(alone, wanted, strict=True))


@in_interpreter
def test_swiglu_of_a_row_is_quantized_as_it_is_written():
    from megatron_rl.kernels.quantize.triton import quantize_activation
    from megatron_rl.kernels.swiglu.triton import multiply, quantize_swiglu

    for width in (128, 1024, 1152):
        x = random(33, 2 * width, seed=0, dtype=torch.bfloat16)
        y = multiply(x)
        assert all(torch.equal(multiply(x[rows]), y[rows]) for rows in CUTS)
        fused, alone = (
            quantize_swiglu(x, None, "pow2", rows=True, columns=False)[0],
            quantize_activation(y, "pow2", rows=True, columns=False)[0],
        )
        assert same_bits(fused, alone)


@pytest.mark.kernels
@in_interpreter
def test_log_probs_are_those_of_any_number_of_ranks_rows_and_dtypes():
    """Parts of one program's columns, one less and one more; with logits of -inf, in some parts all of them."""
    from megatron_rl.kernels.vocabulary.reference import combine, count_parts
    from megatron_rl.kernels.vocabulary.triton import summarize

    assert [count_parts(151936, ranks) for ranks in (1, 2, 8, 16)] == [8, 4, 1, 1] and count_parts(32001, 1) == 1
    for part in (16, 4095, 4096, 4097):
        vocabulary = 8 * part
        logits = (random(3, vocabulary, seed=part) * 5).bfloat16()
        logits[1, part - 1 : 5 * part + 3] = -torch.inf
        targets = torch.tensor([part - 1, 6 * part, vocabulary - 1])
        for temperature in (1.0, 0.7):
            wanted = combine(summarize(logits, targets, temperature, count_parts(vocabulary, 1)))
            expected = (logits.double() / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            assert torch.allclose(wanted.logprobs.double(), expected, atol=1e-5) and all(torch.isfinite(each).all() for each in wanted)
            wide = combine(summarize(logits.float(), targets, temperature, 8))
            alone = combine(summarize(logits[2:], targets[2:], temperature, 8))
            assert all(torch.equal(a, b) and torch.equal(c, b[2:]) for a, b, c in zip(wide, wanted, alone, strict=True))
            for ranks in (2, 8):
                width, count = vocabulary // ranks, count_parts(vocabulary, ranks)
                cut = [logits[:, rank * width :][:, :width].contiguous() for rank in range(ranks)]
                scores = combine(torch.cat([summarize(own, targets - rank * width, temperature, count) for rank, own in enumerate(cut)]))
                assert all(map(torch.equal, scores, wanted))
