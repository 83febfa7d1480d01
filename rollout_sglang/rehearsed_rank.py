"""An engine rank as it would be on a Hopper GPU, built without one: SGLang's own classes, with tensors that have a shape and no memory.

    python -m rollout_sglang.rehearsed_rank RANK,RANK,... < CONFIG.json

A process of its own, as it makes torch believe in a GPU before SGLang is imported: SGLang then takes the branches, and the hooks of this
project, that it takes on Hopper. Packages that a GPU's environment has and this one lacks are stubs. The model is built by SGLang's loader
of dummy weights, for each rank in a process of its own, on torch's device `meta`, processed as after a sync, and filled with a sync's
chunks. Nothing is computed, and no kernel is called. Prints, by rank, what `RehearsedRank` says, in JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from parallel.chunking import Chunk
from rollout_sglang.platform import stub_modules

_GPU_PACKAGES = ("sgl_kernel", "flashinfer", "deep_gemm", "triton_kernels", "flash_attn", "torch_memory_saver")
_LATE_PACKAGES = ("cuda", "cutlass")
"""Imported inside of functions. As stubs they would mislead packages that are there, while those are imported."""


@dataclass(frozen=True)
class RehearsedRank:
    """What one engine rank would hold and do."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> (dtype as torch names it, shape) of every weight it would serve from."""
    activation_formats: dict[str, str]
    """See `rank_handler.read_activation_formats`."""
    unknown: list[str]
    """Tensors that neither a sync fills nor `derived_tensors` knows; the first sync on a GPU would refuse them."""
    model: str
    """SGLang's class."""
    chunks: int
    """Of a sync, that were unpacked into those tensors."""
    sync_fault: str
    """Why the weights are not filled by them, each byte once; "" where they are."""


class _Stream:
    """A stream or an event, on which nothing happens."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...


def main() -> None:
    """See the module's docstring."""
    ranks, config = [int(rank) for rank in sys.argv[1].split(",")], json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr  # libraries print
    _pretend_to_have_a_gpu()
    print(json.dumps({rank: asdict(found) for rank, found in _rehearse(config, ranks).items()}), file=answer, flush=True)


def _pretend_to_have_a_gpu() -> None:
    stub_modules.block_megatron()
    stub_modules.install(*_GPU_PACKAGES)
    import torch

    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)
    answers = {"is_available": True, "is_initialized": True, "device_count": 8, "current_device": 0, "get_device_capability": (9, 0)}
    answers |= {"get_device_name": properties.name, "get_device_properties": properties, "mem_get_info": (79 << 30, 80 << 30)}
    answers |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "_lazy_init"))
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(torch.cuda, name, _Stream)
    torch.version.cuda = "13.0"


def _rehearse(settings: dict[str, Any], ranks: list[int]) -> dict[int, RehearsedRank]:
    from megatron_rl.config import Config
    from megatron_rl.hf.files import read_config
    from megatron_rl.hf.write import describe_weights
    from megatron_rl.precision.contract import PrecisionContract
    from megatron_rl.rollout.engine_placement import place_engine
    from megatron_rl.sync.plan import SyncPlan
    from parallel.model_geometry import ModelGeometry
    from rollout_sglang import launch_args
    from rollout_sglang.hooks import registry

    registry.verify()
    stub_modules.install(*_LATE_PACKAGES)
    config = Config.model_validate(settings, strict=False)
    contract, placement = PrecisionContract.from_config(config.precision), place_engine(config.rollout, 0)[0]
    geometry, layout = ModelGeometry.from_hf_config(read_config(config.model.folder)), config.train.layout.to_layout()
    plan = SyncPlan.make(geometry, layout, config.rollout.to_layout()._replace(engines=1), contract, config.sync.chunk_bytes)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(describe_weights(read_config(config.model.folder), contract)))
        os.environ |= launch_args.make_environment(config, contract, placement) | {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}
        arguments = launch_args.make_server_arguments(config, contract, Path(folder), 30000, placement, "127.0.0.1:29999")
        arguments += ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-custom-all-reduce"]
        import sglang.srt.models.registry  # noqa: F401  once for all ranks

        with multiprocessing.get_context("fork").Pool(len(ranks), maxtasksperchild=1) as pool:  # SGLang's state is the process's
            tasks = [(arguments, config.rollout.tp, rank, [chunk for chunk in plan.chunks if chunk.target == rank]) for rank in ranks]
            return dict(zip(ranks, pool.starmap(_build, tasks, chunksize=1), strict=True))


def _build(arguments: list[str], tp: int, rank: int, chunks: list[Chunk]) -> RehearsedRank:
    """Do what SGLang's scheduler does until the model is loaded; then receive a sync."""
    import torch.distributed as dist
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rollout_sglang import rank_handler
    from rollout_sglang.derived_tensors import find_unknown
    from rollout_sglang.rehearsed_sync import receive

    server_args = prepare_server_args(arguments)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")  # SGLang asks for NCCL
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    pynccl.PyNcclCommunicator = lambda *_, **__: SimpleNamespace(disabled=True, available=False)
    with _on_meta():
        bootstrap.init_parallel_runtime(server_args=server_args, device="cuda", dist_port=0)
        model_config = ModelConfig.from_server_args(server_args)
        bootstrap.init_layer_runtime(model_config=model_config)
        initialize_moe_config()
        initialize_fp8_gemm_config()
        device = SimpleNamespace(device="meta", gpu_id=0)
        loader.initialize_dummy_weights = lambda _: None
        model = loader.DummyModelLoader(LoadConfig(load_format="dummy")).load_model(model_config=model_config, device_config=device)
    live = rank_handler.live_tensors(model)
    try:
        receive(live, chunks)
        sync_fault = ""
    except ValueError as error:
        sync_fault = str(error)
    return RehearsedRank(
        {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in live.items()},
        rank_handler.read_activation_formats(model),
        find_unknown(model, live.values()),
        type(model).__name__,
        len(chunks),
        sync_fault,
    )


def _on_meta() -> Any:
    """Return a mode in which everything that is meant for `cuda` lands on `meta`."""
    import torch
    from torch.overrides import TorchFunctionMode

    def redirect(value: Any) -> Any:
        is_device = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("meta") if is_device else value

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = kwargs or {}
            if function is torch.device:
                return function(*args, **named)
            if function is torch.tensor and isinstance(args[0], (int, float)):
                return function(*args, **{**named, "device": "cpu"})  # SGLang looks at such a number, a scale of the KV cache
            if function is torch.Tensor.cuda:
                return args[0].to("meta")
            return function(*map(redirect, args), **{name: redirect(value) for name, value in named.items()})

    return OnMeta()


if __name__ == "__main__":
    main()
