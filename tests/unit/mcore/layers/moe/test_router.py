"""Routers choose the same experts in the same order with and without gradient, which decides the bits of their weights."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_rl.mcore.layers.moe.router import RoutedMicroBatch, RoutingReplay
from megatron_rl.mcore.layers.moe.token_counts import UNKNOWN

TOKENS, EXPERTS, K = 400, 24, 6


def make_replay(batch: RoutedMicroBatch | None) -> RoutingReplay:
    replay = RoutingReplay(SimpleNamespace(layer_number=1))
    replay.current = batch
    return replay


@pytest.mark.parametrize("settings", [
    {"score_function": "softmax"},
    {"score_function": "softmax", "use_pre_softmax": True},
    {"score_function": "sigmoid", "scaling_factor": 2.5},
    {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, EXPERTS)},
    {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
])  # fmt: skip
@pytest.mark.parametrize("in_a_batch", [False, True])
def test_weights_have_the_same_bits_with_and_without_gradient(settings, in_a_batch):
    nothing = torch.zeros(TOKENS, dtype=torch.bool)
    batch = RoutedMicroBatch(torch.arange(TOKENS), nothing, False, None, False, None, UNKNOWN) if in_a_batch else None
    logits = 3 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return topk_routing_with_score_function(logits, K, router_replay=make_replay(batch), dense_output=True, **settings)

    with_gradient = route(logits.requires_grad_())
    with torch.no_grad():
        without = route(logits)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(without, with_gradient, strict=True))
    assert with_gradient[0].requires_grad and not without[0].requires_grad
