"""Communication between data-parallel replicas in Megatron's buckets: gradients are reduce-scattered during the backward pass, and updated
weights are gathered during the next forward pass, in which each module waits for its own bucket.

Code that reads weights outside of a forward pass must call `finish_gathers` first. It waits, but is not collective.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel

from megatron_rl.config import TrainConfig
from megatron_rl.mcore.base.names import ModelChunks, get_model_chunks


def wrap_chunks(chunks: list[GPTModel], train: TrainConfig) -> list[Any]:
    """Wrap each chunk in Megatron's DistributedDataParallel: flat buffers of parameters and FP32 gradients in buckets."""
    overlaps = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlaps and train.overlap_grad_reduce,
        overlap_param_gather=overlaps and train.overlap_param_gather,
        align_param_gather=True,  # a module waits for its own bucket only: `start_gathers` starts them all
    )
    config = copy.copy(chunks[0].config)  # Megatron's schedule reads these options from the wrapper
    config.finalize_model_grads_func, config.moe_router_bias_update_rate = finalize_model_grads, train.router_bias_rate
    # as in Megatron's training loop, later virtual stages use a single bucket
    wrapped = [_Replica(config, settings, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]
    if settings.overlap_grad_reduce:
        no_sync = [ddp.no_sync for ddp in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    for chunk, ddp in zip(chunks, wrapped, strict=True):
        chunk.wait_for_gathers = lambda ddp=ddp: _finish(ddp)
        for group in _bucket_groups(ddp):
            group.param_gather_dispatched = True  # all replicas load the same weights
            for bucket in group.buckets:
                if bucket.param_data.itemsize == 1:
                    bucket.param_data = bucket.param_data.view(torch.uint8)  # gloo does not support float8
    return wrapped


class _Replica(DistributedDataParallel):
    """Megatron's, which divides all gradients by the number of tokens: only those that this replica steps, by a kernel that reads the
    factor once. PyTorch's product with a tensor of one number on a GPU is not vectorized."""

    def scale_gradients(self, scaling_factor: Any) -> None:
        own = []
        for group in _bucket_groups(self):
            rank, size = group.intra_distributed_optimizer_instance_rank, group.intra_distributed_optimizer_instance_size
            own += [bucket.grad_data.chunk(size)[rank] for bucket in group.buckets]
        if own:
            torch._foreach_mul_(own, scaling_factor.reshape(()))


def start_gathers(wrapped: Iterable[Any]) -> None:
    """Start gathering the updated slices of all replicas, in the order of the forward pass. Returns at once if gathers overlap.
    Collective."""
    for ddp in wrapped:
        _finish(ddp)
        for group in _bucket_groups(ddp):
            group.start_param_sync()


def finish_gathers(model: ModelChunks) -> None:
    """Wait for the weights that this rank is still receiving."""
    for chunk in get_model_chunks(model):
        getattr(chunk, "wait_for_gathers", lambda: None)()


def _finish(ddp: Any) -> None:
    for group in _bucket_groups(ddp):
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def _bucket_groups(ddp: Any) -> list[Any]:
    """Return the bucket groups in the order of the forward pass; Megatron keeps them in the order of the backward pass."""
    return [*reversed(ddp.bucket_groups), *reversed(ddp.expert_parallel_bucket_groups)]
