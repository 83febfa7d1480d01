"""Patches that let an unmodified Megatron-Core run without CUDA. Call `install()` once, before a model is built.

Megatron hard-codes `device="cuda"`, queries `torch.cuda`, compares tensor type strings, and runs collectives that gloo lacks. Each patch
names the Megatron code that needs it. All patches of Megatron are here, except for `products` and replaced classes: `adam.FusedAdam` and
`quantizing_optimizer.QuantizingOptimizer`. They were checked with the releases in `KNOWN_VERSIONS`; any other release is refused.
tests/distributed/test_cpu_patches.py tries each one without.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import UserError
from megatron_rl.mcore.platform.products import patch_linear_products
from megatron_rl.precision.threads import single_threaded

KNOWN_VERSIONS = ("0.19.2",)
_CPU = torch.device("cpu")
_installed = False


class _CpuStream:
    """Replacement of torch.cuda.Stream. A CPU executes in order, so nobody waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def run_forward_single_threaded(model: torch.nn.Module) -> None:
    """Run the forward passes of `model` in one thread, which gives the engine's bits (`batch_invariant`). Backward passes use all
    threads."""
    open_passes: list[contextlib.ExitStack] = []

    def enter(*_: Any) -> None:
        open_passes.append(contextlib.ExitStack())
        open_passes[-1].enter_context(single_threaded())

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(lambda *_: open_passes.pop().close(), always_call=True)


def check_version() -> None:
    """Raise UserError unless the installed megatron-core is one of `KNOWN_VERSIONS`."""
    version = importlib.metadata.version("megatron-core")
    if version not in KNOWN_VERSIONS:
        fix = f"pip install --no-deps --ignore-requires-python megatron-core=={KNOWN_VERSIONS[-1]}"
        raise UserError("megatron-core", version, f"known versions are {', '.join(KNOWN_VERSIONS)}", fix)


def install() -> None:
    """Apply the patches once per process. With CUDA, there are none."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    check_version()
    _installed = True
    _patch_cuda()
    _patch_device_literals()
    _patch_tensor_methods()
    _patch_layers()
    _patch_uneven_collectives()
    _patch_lone_replicas()
    patch_linear_products()


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU  # rope, mappings, p2p and DDP buffers
    cuda.Stream = _CpuStream  # side stream of the MoE dispatcher
    cuda.current_stream = lambda *_: _CpuStream()  # DDP
    # the RNG tracker (activation recomputation) keeps the states of the CPU generator; torch would queue what sets one until CUDA starts
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = cuda.get_rng_state
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _patch_device_literals() -> None:
    # `device="cuda"` in schedules.py, optimizer.py, clip_grads.py and utils.py; rope_utils pins memory unconditionally
    from torch.utils import _device

    _device._device_constructors()  # caches the originals, which `with torch.device(...)` (used by transformers) knows by identity

    def on_cpu(factory: Any, *args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, device=_CPU if str(device).startswith("cuda") else device, **kwargs)

    for name in ("tensor", "zeros"):
        setattr(torch, name, functools.update_wrapper(partial(on_cpu, getattr(torch, name)), getattr(torch, name)))


def _patch_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self  # tied embeddings under pipeline parallelism, optimizer reload
    plain_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # optimizers compare `param.type()` with "torch.cuda.FloatTensor"; return that to Megatron only
        result = plain_type(self, *args, **kwargs)
        if not args and not kwargs and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor.type = type_


def _patch_layers() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    # torch.compile of one sum of integers runs a C++ compiler for 7 s in every process
    TopKRouter._apply_expert_bias = TopKRouter._apply_expert_bias._torchdynamo_orig_callable


def _patch_uneven_collectives() -> None:
    # tensor-parallel ranks of an expert exchange as many tokens as were routed to each; gloo supports equal parts only
    import megatron.core.tensor_parallel.mappings as mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        parts = output.split(output_split_sizes)
        parts[group.rank()].copy_(input_)
        for source, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group_src=source, group=group)
        return output

    def reduce_scatter_uneven(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        summed = input_.clone()
        dist.all_reduce(summed, group=group)
        return summed.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, reduce_scatter_uneven


def _patch_lone_replicas() -> None:
    # gradient and parameter buckets of a single replica: gloo would copy them, NCCL leaves them in place
    import megatron.core.distributed.param_and_grad_buffer as buffers

    def skip_if_alone(collective: Any, *args: Any, group: Any, async_op: bool, **kwargs: Any) -> Any:
        return collective(*args, group=group, async_op=async_op, **kwargs) if group.size() > 1 or async_op else None

    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, partial(skip_if_alone, getattr(buffers, name)))
