"""Rows that go to their experts and back: sums in one order, gradients, and the kernels' bits in Triton's interpreter."""

from __future__ import annotations

import importlib.machinery

import pytest
import torch
from support.processes import call_in_fresh_process

from megatron_rl.kernels.experts.reference import collect, scatter_tokens, sum_tokens, weigh

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec: SGLang's stub modules answer that
needs_triton = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")
TOKENS, K = 5, 3


def draw(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width)).to(dtype)


def make_order() -> torch.Tensor:
    return torch.randperm(TOKENS * K, generator=torch.Generator().manual_seed(0)).view(TOKENS, K).sort(1).values


def sum_in_order(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(order), x.shape[1])
    for places in order.unbind(1):
        total += x[places].float()
    return total.to(x.dtype)


def test_each_is_the_others_gradient():
    order, x, rows = make_order(), draw(TOKENS, 16).requires_grad_(), draw(TOKENS * K, 16).requires_grad_()
    spread, summed = scatter_tokens(x, order), sum_tokens(rows, order)
    assert all(torch.equal(spread[places], x) for places in order.unbind(1))
    assert torch.allclose(summed, sum_in_order(rows, order), atol=1e-6)
    spread.backward(rows.detach())
    summed.backward(x.detach())
    assert torch.equal(x.grad, summed) and torch.equal(rows.grad, spread)


def compare_with_the_references() -> None:
    from megatron_rl.kernels.experts.triton import collect_rows, scatter, sum_rows

    order, places, weights = make_order(), torch.tensor([7, 0, 3]), torch.tensor([0.3, 1.7, 0.0])
    for dtype, width in ((torch.float32, 48), (torch.bfloat16, 64), (torch.int32, 33)):
        x = (draw(TOKENS, width) * 100).to(dtype)
        rows = scatter(x, order)
        assert torch.equal(rows, scatter_tokens(x, order)) and torch.equal(collect_rows(rows, places, None), collect(rows, places))
        if dtype is torch.float32:
            rows = draw(TOKENS * K, width)
            assert torch.equal(sum_rows(rows, order), sum_in_order(rows, order))
            assert torch.equal(collect_rows(rows, places, weights), weigh(rows[places], weights))
    exact = torch.arange(TOKENS * K * 64).view(TOKENS * K, 64).remainder(32).bfloat16()  # the interpreter truncates to BF16
    assert torch.equal(sum_rows(exact, order), sum_in_order(exact, order))
    assert sum_rows(torch.empty(0, 8), torch.empty(0, K, dtype=torch.int64)).shape == (0, 8)


@needs_triton
def test_the_kernels_give_the_references_bits():
    """The interpreter is chosen when Triton is first imported."""
    call_in_fresh_process(compare_with_the_references, TRITON_INTERPRET="1")


@needs_triton
def test_rows_that_do_not_fit_are_refused():
    from megatron_rl.kernels.experts.triton import scatter, sum_rows

    for function in (scatter, sum_rows):
        with pytest.raises(ValueError, match="does not match"):
            function(torch.zeros(4, 8), make_order())
