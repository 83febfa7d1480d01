"""Sums by the tree: the same bits, however many ranks share the addends, and the right number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.kernels.linear.reference import fprop_by_tree
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import round_trip_1x128
from parallel.row_sums import LEAF, halve, holds_node

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cut(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [part.contiguous() for part in x.chunk(ranks, -1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leaves, columns", [(2, 33), (6, 300), (8, 576), (24, 128)])
def test_every_number_of_ranks_and_rows_gives_the_same_bits(leaves, columns, dtype):
    x, weight = random(530, leaves * LEAF, seed=0).to(dtype), random(columns, leaves * LEAF, seed=1).to(dtype)
    whole = tree.multiply(x, weight)
    torch.testing.assert_close(whole, (x.double() @ weight.double().t()).float(), rtol=1e-4, atol=1e-3)
    for rows in (1, 15, 40, 530):
        for ranks in (1, 2, 4, 8):
            if holds_node(leaves * LEAF, ranks):
                parts = [tree.multiply(part[:rows], own) for part, own in zip(cut(x, ranks), cut(weight, ranks), strict=True)]
                assert torch.equal(tree.add(parts), whole[:rows]), (rows, ranks)


def test_quantized_inputs_too():
    x, weight = random(20, 4 * LEAF, seed=0), random(64, 4 * LEAF, seed=1).to(torch.bfloat16).float()
    whole = fprop_by_tree(x, weight, "pow2")
    assert torch.equal(fprop_by_tree(x, weight.bfloat16(), "pow2"), whole)  # as an engine keeps values
    torch.testing.assert_close(whole, round_trip_1x128(x, "pow2") @ weight.t(), rtol=1e-4, atol=1e-3)
    assert torch.equal(tree.add([fprop_by_tree(*parts, "pow2") for parts in zip(cut(x, 4), cut(weight, 4), strict=True)]), whole)


@given(st.integers(1, 12), st.integers(0, 3))
def test_a_node_adds_its_halves(leaves, power):
    """Powers of two beyond FP32's precision, so that another order gives another sum."""
    values = (2.0 ** random(leaves * 2**power, seed=leaves).mul(12).round()).float()

    def add(part: list[float]) -> torch.Tensor:
        middle = halve(len(part))
        return torch.tensor(part[0]) if len(part) == 1 else add(part[:middle]) + add(part[middle:])

    parts = [tree.add(list(part)) for part in values.chunk(2**power)]
    assert tree.add(parts) == add(values.tolist())


def test_a_sum_of_few_numbers_is_one_leaf():
    x, weight = random(16, 96, seed=0), random(40, 96, seed=1)
    assert torch.equal(tree.multiply(x, weight), x @ weight.t())
    assert not holds_node(96, 1) and not holds_node(3 * LEAF, 2) and not holds_node(3 * LEAF, 3) and holds_node(4 * LEAF, 4)


@pytest.mark.parametrize("vocabulary", [151936 // 16, 4096, 1001])
def test_log_softmax_of_a_vocabulary_that_ranks_share(vocabulary):
    logits = random(9, vocabulary, seed=3) * 4
    logits[4, ::3] = -torch.inf
    whole = tree.log_softmax(logits)
    torch.testing.assert_close(whole, F.log_softmax(logits, -1))
    assert all(torch.equal(tree.log_softmax(logits[row : row + 1]), whole[row : row + 1]) for row in range(9))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    for ranks in (1, 2, 4, 8):
        if vocabulary % ranks == 0:
            sums = [tree.sum_vocabulary(part, vocabulary) for part in cut(weights, ranks)]
            assert torch.equal(tree.add(sums), tree.sum_vocabulary(weights, vocabulary))
