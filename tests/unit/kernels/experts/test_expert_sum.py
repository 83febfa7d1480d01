"""The sum over a token's experts against a recursion over the tree, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.kernels.experts import expert_sum
from megatron_rl.kernels.experts.expert_sum import sum_experts
from megatron_rl.kernels.sums import reference as tree

HIDDEN = 5


def add_slowly(outputs: dict[int, torch.Tensor], first: int, count: int) -> torch.Tensor | None:
    """The sum of the experts `first` to `first + count - 1` that there are, by the definition."""
    if count == 1:
        return outputs.get(first)
    half = (count + 1) // 2
    left, right = add_slowly(outputs, first, half), add_slowly(outputs, first + half, count - half)
    return left + right if left is not None and right is not None else right if left is None else left


def draw_choices(num_experts: int, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [n, H] of many magnitudes, tokens [n] and experts [n] in a random order; some tokens have none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, experts = (
        (torch.rand(num_tokens, num_experts, generator=generator) < torch.rand(num_tokens, 1, generator=generator)).nonzero().t()
    )
    order = torch.randperm(len(tokens), generator=generator)
    outputs = torch.randn(len(tokens), HIDDEN, generator=generator) * 2.0 ** torch.randint(-9, 9, (len(tokens), 1), generator=generator)
    return outputs, tokens[order], experts[order]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 999), st.sampled_from([1, 64, 1 << 20]))
def test_any_choice_is_added_up_by_the_tree_over_all_experts(num_experts, num_tokens, seed, tile):
    outputs, tokens, experts = draw_choices(num_experts, num_tokens, seed)
    before = outputs.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_sum, "_TILE", tile)
        summed = sum_experts(outputs, tokens, experts, num_tokens, num_experts, torch.float32)
    assert torch.equal(outputs, before)
    for token in range(num_tokens):
        mine = {int(expert): outputs[i] for i, expert in enumerate(experts) if tokens[i] == token}
        expected = add_slowly(mine, 0, num_experts)
        assert torch.equal(summed[token], torch.zeros(HIDDEN) if expected is None else expected)
        alone = tokens == token  # and without the other tokens
        assert torch.equal(sum_experts(outputs[alone], tokens[alone] * 0, experts[alone], 1, num_experts, torch.float32)[0], summed[token])


@given(st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(0, 999))
def test_any_number_of_expert_parallel_ranks_gives_the_same_bits(experts_of_rank, ranks, seed):
    outputs, tokens, experts = draw_choices(ranks * experts_of_rank, 5, seed)
    whole = sum_experts(outputs, tokens, experts, 5, ranks * experts_of_rank, torch.float32)
    parts = []
    for rank in range(ranks):
        mine = experts // experts_of_rank == rank
        parts.append(sum_experts(outputs[mine], tokens[mine], experts[mine] % experts_of_rank, 5, experts_of_rank, torch.float32))
    assert torch.equal(tree.add(parts), whole)


def test_the_sum_is_rounded_once_and_its_gradient_is_every_outputs():
    outputs, tokens, experts = draw_choices(16, 8, 1)
    outputs = outputs.bfloat16().requires_grad_()
    summed = sum_experts(outputs, tokens, experts, 8, 16, torch.bfloat16)
    assert torch.equal(summed, sum_experts(outputs.detach(), tokens, experts, 8, 16, torch.float32).bfloat16())
    weights = torch.randn(8, HIDDEN).bfloat16()
    summed.backward(weights)
    assert torch.equal(outputs.grad, weights[tokens])
