"""Rehearses engine ranks without a GPU: SGLang's own classes, with tensors that have a shape and no data.

    python -m rollout_sglang.rehearsal.rank RANK,RANK,... < JOB.json

Runs in a process of its own that makes torch report the job's GPU before SGLang is imported, so that SGLang takes the branches and hooks
that it takes on this GPU. GPU packages are replaced by stubs, installed or not, and kernels by shape functions (`rehearsal.kernels`). For
each rank, a forked process builds the model with SGLang's runner and dummy weights, processes the weights as after loading, and unpacks the
chunks of a sync into them. The first rank also runs a batch of prompts and a batch of decoded tokens (`rehearsal.forward`). Prints a JSON
object of rank -> result (`run_rank`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.cost.hardware import Gpu
from parallel.chunking import Chunk
from rollout_sglang.platform import stub_modules

if TYPE_CHECKING:
    from megatron_rl.config import Config

_GPU_PACKAGES = ("triton", "sgl_kernel", "flashinfer", "deep_gemm", "triton_kernels", "flash_attn", "torch_memory_saver", "cuda", "cutlass")
_ALONE = {
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    "SGLANG_USE_SGL_FA3_KERNEL": "true",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
}
"""Disable broadcasts over shared memory, the download of FlashAttention 3 (sgl-kernel has it too), and DeepGEMM's precompilation."""


def main() -> None:
    """Rehearse the ranks of the command line with the job on standard input."""
    from megatron_rl.config import Config

    ranks, job = [int(rank) for rank in sys.argv[1].split(",")], json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr  # libraries print while they are imported
    config = Config.model_validate(job["config"], strict=False)
    gpu = Gpu(**job["gpu"])
    install_gpu(gpu)
    runs = can_run_passes(config)
    with describe_job(config) as (arguments, chunks):
        import_sglang()
        with multiprocessing.get_context("fork").Pool(len(ranks), maxtasksperchild=1) as pool:  # SGLang's state is global
            tasks = [(arguments, config, gpu, rank, chunks(rank), runs and rank == ranks[0]) for rank in ranks]
            found = pool.starmap(run_rank, tasks, chunksize=1)
    print(json.dumps(dict(zip(ranks, found, strict=True))), file=answer, flush=True)


def can_run_passes(config: Config) -> bool:
    """Return whether all kernels of the engine's passes are known: not those of SGLang's own gated delta nets."""
    from megatron_rl.hf.files import read_config
    from megatron_rl.precision.contract import PrecisionContract
    from parallel.attention import GatedDeltaNet
    from rollout_sglang.launch_args import shares_delta_rule

    kinds = config.make_geometry(read_config(config.model.folder)).attention
    return shares_delta_rule(PrecisionContract.from_config(config.precision)) or not any(isinstance(kind, GatedDeltaNet) for kind in kinds)


def install_gpu(gpu: Gpu) -> None:
    """Replace everything that SGLang expects on this GPU, before torch is imported, also installed packages, which require a driver."""
    from megatron_rl.rehearsal import device_guard, hopper

    hopper.become(gpu)

    device_guard.load()
    stub_modules.block_megatron()
    stub_modules.install(*_GPU_PACKAGES)
    stub_modules.replace(*_GPU_PACKAGES)
    from megatron_rl.rehearsal import fake_cuda
    from rollout_sglang.rehearsal import graphs as rehearsed_graphs

    fake_cuda.install_device()
    rehearsed_graphs.install()
    os.environ |= _ALONE


def import_sglang() -> None:
    """Import SGLang with this project's hooks and its models, once for all ranks."""
    from rollout_sglang.hooks import gpu_all_reduce, registry
    from rollout_sglang.rehearsal import kernels as rehearsed_kernels

    rehearsed_kernels.install()
    gpu_all_reduce.all_reduce = lambda original, self, input_: original(self, input_)  # `CustomAllReduceV2` needs NVLink
    registry.verify()
    import sglang.srt.models.registry  # noqa: F401

    rehearsed_kernels.refuse_unknown()


@contextmanager
def describe_job(config: Config) -> Iterator[tuple[list[str], Callable[[int], list[Chunk]]]]:
    """Set the environment of an engine. Yield its server's arguments and a function that returns a rank's chunks of a sync."""
    from megatron_rl.hf.files import read_config
    from megatron_rl.hf.write import describe_weights
    from megatron_rl.precision.contract import PrecisionContract
    from megatron_rl.rollout.engine_placement import EnginePlacement
    from megatron_rl.sync.plan import SyncPlan
    from rollout_sglang import launch_args

    contract, placement = PrecisionContract.from_config(config.precision), EnginePlacement()  # hosts are not needed
    os.environ |= launch_args.make_environment(config, contract, placement)
    hf_config = read_config(config.model.folder)
    geometry, layout = config.make_geometry(hf_config), config.train.layout.to_layout()
    plan = SyncPlan.make(geometry, layout, config.rollout.to_layout()._replace(engines=1), contract, config.sync.chunk_bytes)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(describe_weights(hf_config, contract)), encoding="utf-8")
        arguments = launch_args.make_server_arguments(config, contract, Path(folder), 30000, placement, "127.0.0.1:29999")
        arguments += ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-custom-all-reduce"]
        yield arguments, lambda rank: [chunk for chunk in plan.chunks if chunk.target == rank]


def run_rank(arguments: list[str], config: Config, gpu: Gpu, rank: int, chunks: list[Chunk], runs: bool) -> dict[str, Any]:
    """Load the model as SGLang's scheduler does, run the forward passes if `runs`, and receive a sync. Return for JSON:

    tensors: name -> (torch dtype, shape) of every weight that the rank serves from.
    activation_formats: formats of activation scales; see `rank_handler.read_activation_formats`.
    unknown: tensors that are neither filled by a sync nor known to `derived_tensors`. The first sync on a GPU would refuse them.
    model: SGLang's class.
    chunks: number of chunks of a sync that were unpacked.
    sync_fault: why the chunks do not fill each byte of the weights exactly once, or "".
    forward: `ForwardRehearsal`, or None if no pass ran.
    """
    from megatron_rl.rehearsal.device import set_value
    from megatron_rl.rehearsal.fake_cuda import one_rank
    from rollout_sglang import rank_handler
    from rollout_sglang.derived_tensors import find_unknown
    from rollout_sglang.rehearsal import runner as rehearsed_runner
    from rollout_sglang.rehearsal.forward import EngineRecorder, run_forward
    from rollout_sglang.rehearsal.sync import receive, without_device

    recorder = EngineRecorder()
    with one_rank(rank, config.rollout.tp, gpu, recorder):
        runner = rehearsed_runner.start(arguments, rank)
        for tensor in (*runner.model.parameters(), *runner.model.buffers()):
            set_value(tensor, None)  # values of dummy weights are meaningless
        live = rank_handler.live_tensors(runner.model)
        formats, unknown = rank_handler.read_activation_formats(runner.model), find_unknown(runner.model, live.values())
        forward = run_forward(runner, recorder, config.data.max_prompt_tokens) if runs else None
    weights = without_device(live)
    try:
        receive(weights, chunks)
        sync_fault = ""
    except ValueError as error:
        sync_fault = str(error)
    return {
        "tensors": {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()},
        "activation_formats": formats,
        "unknown": unknown,
        "model": type(runner.model).__name__,
        "chunks": len(chunks),
        "sync_fault": sync_fault,
        "forward": asdict(forward) if forward else None,
    }


if __name__ == "__main__":
    main()
