"""A rank's queries, key and value of a head that others share: exchanged, and as Megatron gathers all heads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region

from megatron_rl.mcore.layers.attention.shared_heads import exchange_heads
from support import trainer

DIM, TOKENS = 8, 5


def exchanged_and_gathered(groups: int, queries: int) -> list[dict[str, Any]]:
    """What this rank gets and its gradient, both ways, for `groups` key-value heads with `queries` query heads each; and numbers sent."""
    trainer.start()
    size = dist.get_world_size()
    rank, ranks, group = dist.get_rank(), size // groups, dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    mixed = torch.randn(TOKENS, 1, (queries + 2) * DIM // ranks, generator=generator).bfloat16()
    gradient = torch.randn(TOKENS, 1, (queries // ranks + 2) * DIM, generator=generator).bfloat16()

    def gather(x: torch.Tensor) -> torch.Tensor:
        """As `megatron.core.transformer.attention.SelfAttention.get_query_key_value_tensors` does."""
        whole = all_gather_last_dim_from_tensor_parallel_region(x).chunk(groups, -1)[rank // ranks]
        query, key_value = whole.split([queries * DIM, 2 * DIM], -1)
        return torch.cat([query.chunk(ranks, -1)[rank % ranks], key_value], -1)

    results: list[dict[str, Any]] = []
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as sent:
        for compute in (lambda x: exchange_heads(x, queries, DIM, ranks, group), gather):
            x = mixed.clone().requires_grad_()
            y = compute(x)
            y.backward(gradient)
            results.append({"y": y.detach(), "dx": x.grad})
    results[0]["sent"] = [call.args[1].numel() for call in sent.call_args_list]
    return results
