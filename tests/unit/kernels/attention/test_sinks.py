"""Attention with sinks and windows: the function, its gradients, and bits that depend neither on other sequences nor on cuts."""

import pytest
import torch
from support.kernel_tests import random

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.attention.reference import group_by_length, grouped_attention

LENGTHS = [1, 5, 31, 32, 33, 0, 70, 150, 1]
HEADS, GROUPS, DIM = 4, 2, 64
WINDOWS = (0, 1, 9, 32, 100)


def row(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((sum(LENGTHS), HEADS, DIM), (sum(LENGTHS), GROUPS, DIM), (sum(LENGTHS), GROUPS, DIM), (HEADS,))
    return [random(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def by_formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int) -> torch.Tensor:
    """Compute each sequence by the definition, in the dtype of the inputs."""
    results = []
    for q, k, v in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0) | (distance >= (window or len(q) + 1))
        scores = torch.einsum("shd,thd->hst", q, k) * DIM**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        results.append(torch.einsum("hst,thd->shd", weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None]), v))
    return torch.cat(results)


@pytest.mark.parametrize("window", WINDOWS)
def test_result_and_gradients_are_those_of_the_formula_in_float64(window):
    inputs = row()
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    output = grouped_attention(*inputs[:3], group_by_length(LENGTHS), None, inputs[3], window)
    wanted = by_formula(*doubles, window)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-6)
    gradient = random(*output.shape, seed=9)
    found = torch.autograd.grad(output, inputs, gradient)
    expected = torch.autograd.grad(wanted, doubles, gradient.double())
    for own, exact in zip(found, expected, strict=True):
        assert (own - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
def test_bits_depend_neither_on_company_nor_on_cuts_nor_on_heads(window, dtype):
    query, key, value, sinks = (x.detach() for x in row(dtype))
    together = grouped_attention(query, key, value, group_by_length(LENGTHS), None, sinks, window).split(LENGTHS)
    for length, whole, q, k, v in zip(LENGTHS, together, *(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
        for chunk in (1, 40):  # decoded tokens, parts of prompts
            for start in range(0, length, chunk):
                end = min(start + chunk, length)
                own = batch[0][:, :, start:end], *(x[:, :, :end] for x in batch[1:])
                part = batch_invariant.attention(*own, torch.arange(start, end)[None], DIM**-0.5, sinks, window)
                assert torch.equal(part[0].transpose(0, 1), whole[start:end])
        if length:
            half = [x[:, : x.shape[1] // 2] for x in batch]
            alone = batch_invariant.attention(*half, torch.arange(length)[None], DIM**-0.5, sinks[: HEADS // 2], window)
            assert torch.equal(alone[0].transpose(0, 1), whole[:, : HEADS // 2])


def test_a_sink_takes_weight_and_a_window_hides_keys():
    query, key, value, sinks = (x.detach() for x in row())
    groups = group_by_length(LENGTHS)
    far = grouped_attention(query, key, value, groups, None, torch.full((HEADS,), -1e4), 0)
    assert torch.equal(far, grouped_attention(query, key, value, groups)), "a sink far below all scores changes nothing"
    only = grouped_attention(query, key, value, groups, None, torch.full((HEADS,), 1e4), 0)
    assert not only.any()
    first = grouped_attention(query, key, value, groups, None, sinks, 1)  # a token sees itself alone
    score = (query * key.repeat_interleave(HEADS // GROUPS, 1)).sum(-1) * DIM**-0.5
    wanted = torch.sigmoid(score - sinks)[..., None] * value.repeat_interleave(HEADS // GROUPS, 1)
    torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-6)
