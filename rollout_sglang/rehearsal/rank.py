"""An engine rank as it would be on a Hopper GPU, without one: SGLang's own classes, with tensors that have a shape and no data.

    python -m rollout_sglang.rehearsal.rank RANK,RANK,... < JOB.json

A process of its own, as it makes torch believe in a GPU before SGLang is imported: SGLang then takes the branches, and the hooks of this
project, that it takes on Hopper. Packages of a GPU's environment are stubs, installed or not, and kernels are functions of shapes
(`rehearsal.kernels`). For each rank, in a process of its own, SGLang's runner builds the model and loads made up weights; they are
processed as after a sync and filled with a sync's chunks. On the first of the ranks a batch of prompts and one of decoded tokens run
(`rehearsal.forward`). Prints, by rank, what `RehearsedRank` says, in JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.chunking import Chunk
from rollout_sglang.platform import stub_modules

if TYPE_CHECKING:
    from megatron_rl.config import Config
    from rollout_sglang.rehearsal.forward import ForwardRehearsal

_GPU_PACKAGES = ("triton", "sgl_kernel", "flashinfer", "deep_gemm", "triton_kernels", "flash_attn", "torch_memory_saver", "cuda", "cutlass")
_ALONE = {
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    "SGLANG_USE_SGL_FA3_KERNEL": "true",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
}
"""No broadcasts over shared memory; FlashAttention 3 of sgl-kernel, where SGLang would ask a hub for it first and fall back to this one; no
products of 16,384 sizes to compile kernels, as in a run."""


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
    forward: ForwardRehearsal | None
    """What a batch of prompts and one of decoded tokens did; None where none ran."""


def main() -> None:
    """See the module's docstring."""
    from megatron_rl.config import Config

    ranks, job = [int(rank) for rank in sys.argv[1].split(",")], json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr  # libraries print
    config = Config.model_validate(job["config"], strict=False)
    believe_in_a_gpu()
    with describe_job(config) as (arguments, chunks):
        import_sglang()
        with multiprocessing.get_context("fork").Pool(len(ranks), maxtasksperchild=1) as pool:  # SGLang's state is the process's
            tasks = [(arguments, config, job["gpu"], rank, chunks(rank), rank == ranks[0]) for rank in ranks]
            found = pool.starmap(run_rank, tasks, chunksize=1)
    print(json.dumps({rank: asdict(each) for rank, each in zip(ranks, found, strict=True)}), file=answer, flush=True)


def believe_in_a_gpu(replaces_installed: bool = True) -> None:
    """Load and replace all that SGLang would find on a Hopper GPU and not here. Before torch is imported. `replaces_installed`: the GPU's
    packages too that are here, which cannot be imported without a driver."""
    from megatron_rl.rehearsal import no_device

    no_device.load()
    stub_modules.block_megatron()
    stub_modules.install(*_GPU_PACKAGES)
    if replaces_installed:
        stub_modules.replace(*_GPU_PACKAGES)
    from megatron_rl.rehearsal import fake_cuda
    from rollout_sglang.rehearsal import graphs as rehearsed_graphs

    fake_cuda.install_device()
    rehearsed_graphs.install()
    os.environ |= _ALONE


def import_sglang() -> None:
    """Import SGLang with this project's hooks, and its models; once for all ranks."""
    from rollout_sglang.hooks import registry
    from rollout_sglang.rehearsal import kernels as rehearsed_kernels

    rehearsed_kernels.install()
    registry.verify()
    import sglang.srt.models.registry  # noqa: F401

    rehearsed_kernels.refuse_unknown()


@contextmanager
def describe_job(config: Config) -> Iterator[tuple[list[str], Callable[[int], list[Chunk]]]]:
    """Set the environment of an engine; give its server's arguments, and a function that returns the chunks of a sync to a rank."""
    from megatron_rl.hf.files import read_config
    from megatron_rl.hf.write import describe_weights
    from megatron_rl.precision.contract import PrecisionContract
    from megatron_rl.rollout.engine_placement import place_engine
    from megatron_rl.sync.plan import SyncPlan
    from rollout_sglang import launch_args

    contract, placement = PrecisionContract.from_config(config.precision), place_engine(config.rollout, 0)[0]
    os.environ |= launch_args.make_environment(config, contract, placement)
    hf_config = read_config(config.model.folder)
    geometry, layout = config.make_geometry(hf_config), config.train.layout.to_layout()
    plan = SyncPlan.make(geometry, layout, config.rollout.to_layout()._replace(engines=1), contract, config.sync.chunk_bytes)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(describe_weights(hf_config, contract)))
        arguments = launch_args.make_server_arguments(config, contract, Path(folder), 30000, placement, "127.0.0.1:29999")
        arguments += ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-custom-all-reduce"]
        yield arguments, lambda rank: [chunk for chunk in plan.chunks if chunk.target == rank]


def run_rank(arguments: list[str], config: Config, gpu: dict[str, Any], rank: int, chunks: list[Chunk], runs: bool) -> RehearsedRank:
    """Do what SGLang's scheduler does until the model is loaded; receive a sync; run the batches where `runs`."""
    from megatron_rl.cost.hardware import Gpu
    from megatron_rl.rehearsal.device import set_value
    from megatron_rl.rehearsal.fake_cuda import one_rank
    from rollout_sglang import rank_handler
    from rollout_sglang.derived_tensors import find_unknown
    from rollout_sglang.rehearsal import runner as rehearsed_runner
    from rollout_sglang.rehearsal.forward import EngineRecorder, run_forward
    from rollout_sglang.rehearsal.sync import receive, without_device

    recorder = EngineRecorder()
    with one_rank(rank, config.rollout.tp, Gpu(**gpu), recorder):
        runner = rehearsed_runner.start(arguments, rank)
        for tensor in (*runner.model.parameters(), *runner.model.buffers()):
            set_value(tensor, None)  # made up weights have no numbers that a pass may count on
        live = rank_handler.live_tensors(runner.model)
        formats, unknown = rank_handler.read_activation_formats(runner.model), find_unknown(runner.model, live.values())
        forward = run_forward(runner, recorder, config.data.max_prompt_tokens) if runs else None
    weights = without_device(live)
    try:
        receive(weights, chunks)
        sync_fault = ""
    except ValueError as error:
        sync_fault = str(error)
    return RehearsedRank(
        {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights.items()},
        formats,
        unknown,
        type(runner.model).__name__,
        len(chunks),
        sync_fault,
        forward,
    )


if __name__ == "__main__":
    main()
