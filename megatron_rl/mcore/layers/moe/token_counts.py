"""Token counts of expert parallelism.

A layer counts its tokens, exchanges the counts with other ranks, and waits for the device until the host knows them (`start_count`). If
routers replay recorded experts, the counts of all layers and micro-batches are known before any pass and copied at once (`count_ahead`).
Passes without gradient need no counts on the host (`forecast`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.mcore.layers.moe.forecast import LayerForecast


@dataclass(frozen=True)
class LayerCounts:
    """Token counts of one micro-batch in one layer, int64 on the host."""

    sent: torch.Tensor  # [ep]: tokens sent from this rank to each rank
    received: torch.Tensor  # [ep, etp, own experts]: tokens received from each rank for each expert of this rank


KnownRoutes = Mapping[int, LayerCounts | LayerForecast]  # known or expected counts of a micro-batch, by layer
UNKNOWN: KnownRoutes = {}  # nothing is known because routers choose the experts


def counts_on_device() -> bool:
    """Return whether tokens are counted on a device that the host should not wait for."""
    return torch.cuda.is_available()


def keeps_routing(algorithm: AlgorithmConfig) -> bool:
    """Return whether an update replays the experts that the pass of the old log-probs chose. Without replay, a step's only optimizer step
    would choose the same ones, because the weights are the same, but the host would wait for the device in each layer to count them."""
    own = {"trainer": True, "none": algorithm.updates_per_step == 1 and counts_on_device(), "engine": False}
    return own[algorithm.routing_replay]


def gather_counts(own: torch.Tensor) -> torch.Tensor:
    """Return the counts [ranks * experts] of all ranks that exchange tokens, for this rank's [experts]. Collective among them."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    gathered = own if group.size() == 1 else own.new_empty(group.size() * len(own))
    if group.size() > 1:
        dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered


def start_count(own: torch.Tensor) -> Callable[[], LayerCounts]:
    """Exchange the numbers of tokens [experts] that this rank sends to each expert; return a function that waits for the counts on the
    host. Collective among ranks that exchange tokens."""
    group, gathered = parallel_state.get_expert_tensor_and_model_parallel_group(), gather_counts(own)
    on_host = gathered.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream().record_event() if gathered.is_cuda else None

    def finish() -> LayerCounts:
        if arrived is not None:
            arrived.synchronize()
        ep, place = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
        by_place = on_host.view(group.size(), ep, -1)  # [ranks, ep, own experts]; ranks with the same experts are adjacent
        return LayerCounts(by_place[group.rank()].sum(-1), by_place[:, place].unflatten(0, (ep, -1)))

    return finish


def count_ahead(records: Iterable[torch.Tensor], layers: list[int], num_experts: int, device: torch.device) -> list[KnownRoutes]:
    """Return the counts of each micro-batch. The host waits for `device` once. Collective among ranks that exchange tokens. `records` holds
    the experts [t, n, k] of this rank's tokens per micro-batch, on the host, in all layers from the first to the last of `layers`, the
    layers with experts."""
    places = copy_to_device(torch.tensor(layers) - layers[0], device)  # records of layers without experts are never read
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
    """Count [t, layers, k] as int32 [layers, experts] without waiting for the device."""
    index = experts.transpose(0, 1).flatten(1).long()
    counts = torch.zeros(len(index), num_experts, dtype=torch.int32, device=experts.device)
    return counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
