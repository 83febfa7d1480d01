"""How many tokens go where.

A layer counts its tokens, asks the other ranks, and waits for the device until the host knows (`start_count`). Where routers replay a
record, that says it all before: the tokens of all layers of all micro-batches are counted, exchanged and copied to the host at once,
outside of any pass (`count_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.kernels.device_copy import copy_to_device


@dataclass(frozen=True)
class LayerCounts:
    """The tokens of one micro-batch that ranks exchange in one layer, int64 on the host."""

    sent: torch.Tensor
    """[ep]: from this rank to each."""
    received: torch.Tensor
    """[ep, etp, own experts]: from each rank to each expert of this one."""


KnownRoutes = Mapping[int, LayerCounts]
"""Of one micro-batch, by layer."""
UNKNOWN: KnownRoutes = {}
"""Where routers choose."""


def start_count(routing_map: torch.Tensor) -> Callable[[], LayerCounts]:
    """Count the tokens of a layer, bool [t, experts], and send the counts on their way to the host; return what waits for them there.
    Collective among ranks that exchange tokens."""
    own, group = routing_map.sum(0), parallel_state.get_expert_tensor_and_model_parallel_group()
    gathered = own if group.size() == 1 else own.new_empty(group.size() * len(own))
    if group.size() > 1:
        dist.all_gather_into_tensor(gathered, own, group=group)
    on_host = gathered.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream().record_event() if gathered.is_cuda else None

    def finish() -> LayerCounts:
        if arrived is not None:
            arrived.synchronize()
        ep, place = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
        by_place = on_host.view(group.size(), ep, -1)  # [ranks, ep, own experts]; ranks with the same experts lie side by side
        return LayerCounts(by_place[group.rank()].sum(-1), by_place[:, place].unflatten(0, (ep, -1)))

    return finish


def count_ahead(records: Iterable[torch.Tensor], layers: list[int], num_experts: int, device: torch.device) -> list[KnownRoutes]:
    """Count the tokens of micro-batches. `records`: experts [t, n, k] of this rank's tokens in each, on the host, in all layers from the
    first to the last of `layers`. Collective: ranks that exchange tokens pass as many, of the same layers. The host waits once for
    `device`."""
    places = copy_to_device(torch.tensor(layers) - layers[0], device)  # what a record says of layers without experts is never read
    counts = torch.stack([_count(copy_to_device(record, device).index_select(1, places), num_experts) for record in records])
    ep = parallel_state.get_expert_model_parallel_world_size()
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    by_rank = counts.unflatten(-1, (ep, -1)).permute(2, 0, 1, 3)
    outgoing = by_rank.repeat_interleave(group.size() // ep, dim=0)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    totals = by_rank.sum(-1, dtype=counts.dtype)
    on_host = torch.cat([totals.flatten(), incoming.flatten()]).cpu().long()
    sent, received = on_host.split([totals.numel(), incoming.numel()])
    by_layer = zip(sent.view(totals.shape).unbind(1), received.view(ep, -1, *incoming.shape[1:]).unbind(2), strict=True)
    return [
        {layer: LayerCounts(there[:, place].contiguous(), here[:, :, place]) for place, layer in enumerate(layers)}
        for there, here in by_layer
    ]


def _count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[t, layers, k] -> int32 [layers, experts], which no host waits for."""
    index = experts.transpose(0, 1).flatten(1).long()
    counts = torch.zeros(len(index), num_experts, dtype=torch.int32, device=experts.device)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
