"""SGLang's own model runner, created as its scheduler does, on a GPU without data."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _device


def start(arguments: Sequence[str], rank: int) -> Any:
    """Return SGLang's ModelRunner with its model loaded, for rank `rank` of an engine. `arguments` are the server's command line."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(list(arguments))
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    _replace_what_needs_peers()
    bootstrap.init_parallel_runtime(server_args=server_args, device="cuda", dist_port=0)
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_layer_runtime(model_config=model_config)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    fraction = get_schedule().mem_fraction_static
    return ModelRunner(model_config=model_config, mem_fraction_static=fraction, gpu_id=0, nccl_port=0, server_args=server_args)


def _replace_what_needs_peers() -> None:
    """Replace everything that talks to other ranks or to a driver: process groups, the NCCL communicator, pinned memory, and the library
    that frees a colocated engine's memory. NCCL's all-reduce replaces SGLang's all-reduce for small tensors."""
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.model_loader import loader
    from sglang.srt.models import qwen3_next
    from sglang.srt.utils import torch_memory_saver_adapter

    from megatron_rl.rehearsal import collectives
    from rollout_sglang.rehearsal import graphs as rehearsed_graphs

    distributed: Any = dist
    new_group = dist.new_group

    def make_group(ranks: Any = None, *_: Any, backend: str = "nccl", **__: Any) -> Any:
        group = new_group(ranks, backend="fake")
        if backend == "gloo":
            collectives.host_groups.add(group)
        return group

    distributed.new_group = make_group
    distributed.monitored_barrier = lambda *_, **__: None
    pynccl.PyNcclCommunicator = lambda *_, **__: SimpleNamespace(disabled=True, available=False, change_state=lambda **_: nullcontext())
    loader.initialize_dummy_weights = lambda _: None
    qwen3_next.Qwen3GatedDeltaNet._make_packed_weight_loader = staticmethod(lambda _: None)  # reads what a tensor without data lacks
    saver: Any = torch_memory_saver_adapter
    saver._memory_saver = SimpleNamespace(region=lambda **_: nullcontext(), cuda_graph=rehearsed_graphs.capture, enabled=True)
    _device._device_constructors()  # torch caches the list of these functions at its first use
    torch_functions: Any = torch
    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch_functions, name, _without_pinning(getattr(torch, name)))


def _without_pinning(function: Any) -> Any:
    return lambda *args, pin_memory=False, **named: function(*args, **named)
