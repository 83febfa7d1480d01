"""Kernels on rows that trainer and engine share: one row, many rows, misaligned rows, and both sides' layouts have the same bits. Reports
how many values SGLang's own kernels round otherwise."""

import pytest
import torch
from support.kernel_tests import random

from megatron_rl.kernels.heads import Heads
from megatron_rl.kernels.heads import reference as heads
from megatron_rl.kernels.norm import reference as norm
from megatron_rl.kernels.rope.reference import Rotation
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.kernels.vocabulary import reference as vocabulary

EPS = 1e-6
WIDTHS, VOCABULARY = {"cuda": (896, 2048, 4096, 5120), "cpu": (256,)}, {"cuda": 151936, "cpu": 1024}
TOKENS, CUTS = {"cuda": 2048, "cpu": 80}, (slice(0, 1), slice(7, 14), slice(15, 79))


def draw(device, *shape, seed=0, dtype=torch.bfloat16):
    return random(*shape, seed=seed, dtype=dtype).to(device)


def misalign(x):
    """Return a copy whose address is a multiple of 8 bytes, not of 16."""
    skipped = 8 // x.itemsize
    return torch.empty(x.numel() + skipped, dtype=x.dtype, device=x.device)[skipped:].view(x.shape).copy_(x)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_norms(device, record_property):
    for width in WIDTHS[device]:
        x, residual = (draw(device, TOKENS[device], width, seed=seed) for seed in (0, 1))
        weight = draw(device, width, seed=2)
        whole = norm.normalize(x, residual, weight, EPS)
        assert same(norm.normalize(misalign(x), misalign(residual), misalign(weight), EPS), whole), width
        assert same(norm.normalize(whole[0], None, weight, EPS)[1:], whole[1:]), "the sum's own norm"
        for rows in CUTS:
            assert same(norm.normalize(x[rows], residual[rows], weight, EPS), (part[rows] for part in whole)), (width, rows)
        if device == "cuda":
            check_quantized_norm(x, residual, weight, whole)
            from sgl_kernel import fused_add_rmsnorm

            fused_add_rmsnorm(x, residual, weight, EPS)
            record_property(f"norms of {width}: values that SGLang's kernel rounds otherwise", int((x != whole[2]).sum()))


def check_quantized_norm(x, residual, weight, whole):
    """Both sides quantize in the kernel that normalizes; the engine's also writes the norm."""
    from megatron_rl.kernels.norm.triton import quantize_norm
    from megatron_rl.kernels.quantize.triton import quantize_activation

    if x.shape[1] % 128 == 0:
        total, statistic, rows, _ = quantize_norm(x, residual, weight, EPS, "pow2", columns=False)
        wanted = quantize_activation(whole[2], "pow2", rows=True, columns=False)[0]
        assert same((total, statistic, rows[0].view(torch.uint8), rows[1]), (*whole[:2], wanted[0].view(torch.uint8), wanted[1]))
        for few in CUTS:
            result = torch.empty_like(x[few])
            own = quantize_norm(x[few], residual[few], weight, EPS, "pow2", columns=False, result=result)[2]
            assert same((result, own[0].view(torch.uint8), own[1]), (whole[2][few], wanted[0][few].view(torch.uint8), wanted[1][few]))


@pytest.mark.parametrize("dim, groups, queries", [(128, 8, 4), (64, 2, 7)])
def test_heads_of_groups_and_of_rows(device, dim, groups, queries):
    tokens = TOKENS[device]
    angles = torch.outer(torch.arange(float(tokens), device=device), 1 / 1e6 ** (torch.arange(dim // 2, device=device) / dim))
    rotation = Rotation.from_angles(angles, torch.arange(tokens, device=device), False)
    mixed, norms = draw(device, tokens, groups * (queries + 2) * dim), (draw(device, dim, seed=1), draw(device, dim, seed=2))
    by_group = mixed.view(tokens, groups, queries + 2, dim).split([queries, 1, 1], 2)
    row = torch.cat([part.reshape(tokens, -1) for part in by_group], 1)
    q, k, _ = (part.unflatten(1, (-1, dim)) for part in row.split([groups * queries * dim, groups * dim, groups * dim], 1))
    whole = heads.rotate_heads(mixed, Heads(groups, queries, rotation, EPS), norms)
    for rows in (slice(None), *CUTS):
        own = rotation._replace(positions=rotation.positions[rows])
        assert same(heads.rotate_heads(mixed[rows].contiguous(), Heads(groups, queries, own, EPS), norms), (x[rows] for x in whole))
        assert same(heads.turn_heads(*heads.normalize_heads(q[rows], k[rows], norms, EPS), own), (x[rows] for x in whole)), rows
        assert same(heads.normalize_and_turn_heads(q[rows], k[rows], norms, EPS, own), (x[rows] for x in whole)), rows


def test_swiglu(device, record_property):
    for width in WIDTHS[device]:
        x = draw(device, TOKENS[device], 2 * width)
        y = swiglu.multiply(x)
        assert all(torch.equal(swiglu.multiply(x[rows]), y[rows]) for rows in CUTS)
        if device == "cuda" and width % 128 == 0:
            from megatron_rl.kernels.quantize.triton import quantize_activation
            from megatron_rl.kernels.swiglu.triton import multiply_and_quantize

            result, found = multiply_and_quantize(x, "pow2")
            wanted = quantize_activation(y, "pow2", rows=True, columns=False)[0]
            assert same((result, found[0].view(torch.uint8), found[1]), (y, wanted[0].view(torch.uint8), wanted[1]))
        if device == "cuda":
            from sgl_kernel import silu_and_mul

            record_property(f"SwiGLU of {width}: values that SGLang's kernel rounds otherwise", int((silu_and_mul(x) != y).sum()))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_any_ranks_and_dtypes(device, temperature):
    """The engine divides FP32 logits by a tensor of temperatures, the trainer BF16 logits by a number. A filter leaves -inf."""
    size = VOCABULARY[device]
    logits, targets = draw(device, 80, size) * 4, torch.arange(80, device=device) * (size // 80)
    logits[3, size // 16 :] = -torch.inf
    targets[3] = 5

    def score(x, columns, ranks, by=temperature):
        parts, width = vocabulary.count_parts(size, ranks), size // ranks
        cut = (x[:, rank * width :][:, :width].contiguous() for rank in range(ranks))
        return vocabulary.combine(torch.cat([vocabulary.summarize(own, columns - rank * width, by, parts) for rank, own in enumerate(cut)]))

    whole = score(logits, targets, 1)
    for ranks in (2, 4, 8):
        assert same(score(logits, targets, ranks), whole), ranks
    assert same(score(logits.float() / torch.full((80, 1), temperature, device=device), targets, 1, 1.0), whole)
    for rows in CUTS:
        assert same(score(logits[rows], targets[rows], 1), (each[rows] for each in whole)), rows
    exact = (logits.double() / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(whole.logprobs.double(), exact, atol=1e-4)
