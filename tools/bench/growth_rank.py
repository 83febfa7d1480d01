"""One rank of a case of `growth.py`, under torchrun:  growth_rank.py FOLDER LAYOUT TOKENS

FOLDER holds `model`; the rank's usage is written beside it as rankN.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config import PrecisionConfig, TrainConfig  # sets how threads wait, so it comes before torch

# isort: split
import torch
from train_step import make_samples

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.weights.export import convert
from megatron_rl.mcore.weights.load_weights import build_rank_shards, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout, parse_sizes

_FILE_BYTES = 1 << 22
"""Of an export, so that ranks have files to share."""


@dataclass(frozen=True)
class Usage:
    """One rank's use of a phase, in bytes; of memory the most beside what the process held before its first phase."""

    memory: int
    written: int
    """By system calls: to other ranks over gloo, and to files."""
    seconds: float
    """Of the processor."""


class Meter:
    """Measures the phases of this process, on Linux."""

    def __init__(self) -> None:
        self._empty = _read_memory("VmRSS")
        self.phases: dict[str, Usage] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
        written, start = _read_written(), time.process_time()
        yield
        seconds = time.process_time() - start
        self.phases[name] = Usage(_read_memory("VmHWM") - self._empty, _read_written() - written, seconds)


def _read_memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _read_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def run_phases(folder: Path, layout: Layout, tokens: int) -> dict[str, Usage]:
    """Load the model, take a step on random answers, write a checkpoint, export it; return what each took."""
    precision = PrecisionConfig(mode="fp8_unified")
    meter, train, hf_config = Meter(), TrainConfig(micro_batch_tokens=512), read_config(folder / "model")
    with meter.phase("start"):
        model = build_model(hf_config, layout, PrecisionContract.from_config(precision), train)
        load_checkpoint(model, folder / "model", build_rank_shards(hf_config, layout))
        actor = Actor(model, train, temperature=1.0)
    samples = select_own(make_samples(tokens, 32, 32, hf_config["vocab_size"]))
    with meter.phase("step"):
        for sample, logprobs in zip(samples, actor.compute_logprobs(samples)[0], strict=True):
            sample.old_logprobs = logprobs
        actor.update(samples, PolicyLoss(AlgorithmConfig()))
    with meter.phase("checkpoint"):
        state = {"step": 1, "precision": precision.model_dump(mode="json")}
        CheckpointWriter(folder / "checkpoint", model, hf_config, folder / "model", state, actor.optimizer).finish()
    with meter.phase("export"):
        convert(folder / "checkpoint", folder / "export", {}, file_bytes=_FILE_BYTES)
    return meter.phases


def main(folder: Path, sizes: str, tokens: int) -> None:
    """Run the phases and write what they took."""
    layout = Layout(**parse_sizes("LAYOUT", sizes, ("tp", "pp", "dp", "ep", "cp")))
    torch.set_num_threads(1)
    start_megatron(layout, seed=0)
    usage = {name: asdict(used) for name, used in run_phases(folder, layout, tokens).items()}
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(usage))
    stop_megatron()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
