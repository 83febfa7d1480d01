"""Faults planted into a rehearsed trainer, as context managers. Import this module after `install_device`."""

from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.kernels.linear import gather
from megatron_rl.kernels.linear.deep_gemm import DeepGemmBackend
from megatron_rl.mcore import actor
from megatron_rl.mcore.layers.attention.core_attention import CoreAttention
from megatron_rl.mcore.layers.moe.router import ModelRouters
from megatron_rl.mcore.passes.context_parallel import ContextShard


@contextmanager
def around(owner, name, call):
    """Replace a function or method by `call(plain, *arguments)`."""
    stored = owner.__dict__[name]
    kind = type(stored) if isinstance(stored, (classmethod, staticmethod)) else lambda function: function
    plain = stored.__func__ if kind is type(stored) else stored
    setattr(owner, name, kind(lambda *args, **options: call(plain, *args, **options)))
    try:
        yield
    finally:
        setattr(owner, name, stored)


def host_tensor_in_loss():
    def call(plain, loss, logprobs, batch):
        return plain(loss, logprobs * torch.ones(batch.tokens.shape), batch)

    return around(PolicyLoss, "__call__", call)


def _in_attention(change):
    return around(CoreAttention, "forward", lambda plain, *args, **options: change(plain(*args, **options)))


def item_per_layer():
    return _in_attention(lambda result: (result.sum().item(), result)[1])


def doubled_activation():
    def widen(result):
        for _ in range(16):  # each keeps its factors for the backward pass
            result = result * result.detach().clone()
        return result

    return _in_attention(widen)


def gather_in_wrong_group():
    return around(gather, "gather_first", lambda plain, x, group: plain(x, parallel_state.get_data_parallel_group()))


def gather_among_context_ranks():
    """Activations are gathered in the context-parallel group, which has the size of the tensor-parallel group."""
    return around(gather, "gather_first", lambda plain, x, group: plain(x, parallel_state.get_context_parallel_group()))


def context_in_tensor_ranks():
    """Queries are exchanged with ranks that hold other heads."""

    def shard(plain, *args):
        return replace(plain(*args), group=parallel_state.get_tensor_model_parallel_group())

    return around(ContextShard, "for_this_rank", shard)


def _tokens_among(get_group):
    def start(plain, dispatcher, *args, **options):
        plain(dispatcher, *args, **options)
        dispatcher.ep_group = get_group()

    return around(MoEAlltoAllTokenDispatcher, "__init__", start)


def tokens_among_replicas():
    """Tokens are sent to the ranks that have the same experts."""
    return _tokens_among(parallel_state.get_expert_data_parallel_group)


def tokens_among_parts_of_experts():
    """Tokens are sent to the ranks that have other shards of the same experts."""
    return _tokens_among(parallel_state.get_expert_tensor_parallel_group)


def experts_among_replicas():
    """Weights of experts are not marked as having other replicas."""

    def wrap(plain, chunks, train):
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            weight.allreduce = True
        return plain(chunks, train)

    return around(actor, "wrap_chunks", wrap)


def backward_among_experts_ranks():
    """Only the gradient of the output layer's gathered input is sent to ranks with other experts."""

    def backward(plain, ctx, gradient):
        ctx.group = parallel_state.get_expert_model_parallel_group()
        return plain(ctx, gradient)

    return around(mappings._GatherFromSequenceParallelRegion, "backward", backward)


def sum_from_unknown_line():
    """A function that is not in the table all-reduces log-probs."""

    def call(plain, loss, logprobs, batch):
        dist.all_reduce(logprobs.detach().clone(), group=parallel_state.get_tensor_model_parallel_group())
        return plain(loss, logprobs, batch)

    return around(PolicyLoss, "__call__", call)


def routes_counted_in_passes():
    """Tokens of experts are not counted before a pass."""
    return around(ModelRouters, "count_ahead", lambda plain, routers, batches: [{}] * len(batches))


def refused_scales():
    def prepare(plain, *args):
        weight = plain(*args)
        data, scale = weight.fprop
        return weight._replace(fprop=(data, scale[:-1]))

    return around(DeepGemmBackend, "prepare", prepare)


def module_without_a_share():
    """A module of the MLP has no `sharded_state_dict`, which Megatron calls for a checkpoint."""

    def share(plain, mlp, *args, **options):
        mlp.activation_func = torch.nn.Identity()
        return plain(mlp, *args, **options)

    return around(MLP, "sharded_state_dict", share)


def part_at_another_place():
    """The first rank's columns of a weight are saved at the place of the second rank's."""

    def share(plain, *args, **options):
        parts = plain(*args, **options)
        for part in (part for part in parts.values() if isinstance(part, ShardedTensor)):
            offset = (*part.global_offset[:-1], part.local_shape[-1] - part.global_offset[-1])
            object.__setattr__(part, "global_offset", offset)
        return parts

    return around(RowParallelLinear, "sharded_state_dict", share)
