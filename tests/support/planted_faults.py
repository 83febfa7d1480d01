"""Faults planted into a rehearsed trainer, as functions that return context managers. Import this module after `install_device`."""

from dataclasses import replace
from unittest import mock

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


def fault(owner, name):
    """Decorator: make the fault in which a function or method is replaced by `call(plain, *arguments)`."""
    stored = owner.__dict__[name]
    kind = type(stored) if isinstance(stored, (classmethod, staticmethod)) else lambda function: function
    plain = stored.__func__ if kind is type(stored) else stored
    return lambda call: lambda: mock.patch.object(owner, name, kind(lambda *args, **options: call(plain, *args, **options)))


@fault(PolicyLoss, "__call__")
def host_tensor_in_loss(plain, loss, logprobs, batch):
    return plain(loss, logprobs * torch.ones(batch.tokens.shape), batch)


@fault(CoreAttention, "forward")
def item_per_layer(plain, *args, **options):
    result = plain(*args, **options)
    result.sum().item()
    return result


@fault(CoreAttention, "forward")
def doubled_activation(plain, *args, **options):
    result = plain(*args, **options)
    for _ in range(16):  # each keeps its factors for the backward pass
        result = result * result.detach().clone()
    return result


@fault(gather, "gather_first")
def gather_in_wrong_group(plain, x, group):
    return plain(x, parallel_state.get_data_parallel_group())


@fault(gather, "gather_first")
def gather_among_context_ranks(plain, x, group):
    """Activations are gathered in the context-parallel group, which has the size of the tensor-parallel group."""
    return plain(x, parallel_state.get_context_parallel_group())


@fault(ContextShard, "for_this_rank")
def context_in_tensor_ranks(plain, *args):
    """Queries are exchanged with ranks that hold other heads."""
    return replace(plain(*args), group=parallel_state.get_tensor_model_parallel_group())


@fault(MoEAlltoAllTokenDispatcher, "__init__")
def tokens_among_replicas(plain, dispatcher, *args, **options):
    """Tokens are sent to the ranks that have the same experts."""
    plain(dispatcher, *args, **options)
    dispatcher.ep_group = parallel_state.get_expert_data_parallel_group()


@fault(MoEAlltoAllTokenDispatcher, "__init__")
def tokens_among_parts_of_experts(plain, dispatcher, *args, **options):
    """Tokens are sent to the ranks that have other shards of the same experts."""
    plain(dispatcher, *args, **options)
    dispatcher.ep_group = parallel_state.get_expert_tensor_parallel_group()


@fault(actor, "wrap_chunks")
def experts_among_replicas(plain, chunks, train):
    """Weights of experts are not marked as having other replicas."""
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        weight.allreduce = True
    return plain(chunks, train)


@fault(mappings._GatherFromSequenceParallelRegion, "backward")
def backward_among_experts_ranks(plain, ctx, gradient):
    """Only the gradient of the output layer's gathered input is sent to ranks with other experts."""
    ctx.group = parallel_state.get_expert_model_parallel_group()
    return plain(ctx, gradient)


@fault(PolicyLoss, "__call__")
def sum_from_unknown_line(plain, loss, logprobs, batch):
    """A function that is not in the table all-reduces log-probs."""
    dist.all_reduce(logprobs.detach().clone(), group=parallel_state.get_tensor_model_parallel_group())
    return plain(loss, logprobs, batch)


@fault(ModelRouters, "count_ahead")
def routes_counted_in_passes(plain, routers, batches):
    """Tokens of experts are not counted before a pass."""
    return [{}] * len(batches)


@fault(DeepGemmBackend, "prepare")
def refused_scales(plain, *args):
    weight = plain(*args)
    data, scale = weight.fprop
    return type(weight)(data, scale[:-1])


@fault(MLP, "sharded_state_dict")
def module_without_a_share(plain, mlp, *args, **options):
    """A module of the MLP refuses the arguments with which Megatron calls its `sharded_state_dict` for a checkpoint."""

    def sharded_state_dict():
        return {}

    mlp.activation_func.sharded_state_dict = sharded_state_dict
    return plain(mlp, *args, **options)


@fault(RowParallelLinear, "sharded_state_dict")
def part_at_another_place(plain, *args, **options):
    """The first rank's columns of a weight are saved at the place of the second rank's."""
    parts = plain(*args, **options)
    for part in (part for part in parts.values() if isinstance(part, ShardedTensor)):
        offset = (*part.global_offset[:-1], part.local_shape[-1] - part.global_offset[-1])
        object.__setattr__(part, "global_offset", offset)
    return parts
