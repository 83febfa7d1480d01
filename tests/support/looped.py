"""The real loop and trainer with a scripted engine: run in the one rank of a `World`, quickly and without SGLang."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.distributed import run_on_rank0
from megatron_rl.mcore.actor import Actor, Policy
from megatron_rl.mcore.load_weights import load_checkpoint
from megatron_rl.mcore.model import build_model, freeze
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.loop import Loop
from megatron_rl.training.mismatch_attribution import MismatchAttribution
from megatron_rl.training.train_state import TrainState
from megatron_rl.types import Completion, Problem, Reward
from support.trainer import Trainer

T = TypeVar("T")

GROUPS, SIZE = 4, 4
GOOD, BAD = 11, 12
"""The token that every rewarded answer is made of, and that of the others."""
SAID = [13, 14]
"""What an environment says."""


class ScriptedWorker:
    """Always the same groups, half of each rewarded; engine log-probs are the trainer's and a little noise.

    `said`: an environment speaks after the first token of each answer, and this is stored as the log-prob of what it says.
    """

    def __init__(self, actor: Actor, noise: float, said: float | None) -> None:
        self.actor, self._noise, self._said, self._source = actor, noise, said, random.Random(0)

    def sequences(self) -> list[TrainingSample]:
        found = [
            TrainingSample([5, 6 + group, 7], [GOOD if member % 2 else BAD] * (2 + member))
            for group in range(GROUPS)
            for member in range(SIZE)
        ]
        for sequence in found if self._said is not None else []:
            sequence.response_mask = [True, *[False] * len(SAID), *[True] * (len(sequence.response_ids) - 1)]
            sequence.response_ids[1:1] = SAID
        return found

    def collect(self, version: int) -> RolloutBatch:
        completions = []
        for number, (sequence, logprobs) in enumerate(zip(self.sequences(), self.actor.compute_logprobs(self.sequences())[0], strict=True)):
            told = [value + self._source.gauss(0, self._noise) for value in logprobs.tolist()]
            reward = Reward(float(number % 2), bool(number % 2))
            ids = sequence.prompt_ids, sequence.response_ids
            if self._said is not None:
                told[1:1] = [self._said] * len(SAID)
            completions.append(
                Completion(Problem(str(number), "", ""), *ids, told, "stop", version, "", reward, response_mask_T=sequence.response_mask)
            )
        return RolloutBatch(completions, {"time/generate": 1.0})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def evaluate(self, version: int) -> dict[str, float]:
        """How much likelier a good token is than a bad one, in nats."""
        found = self.actor.compute_logprobs(self.sequences())[0]
        good, bad = (torch.cat([part for number, part in enumerate(found) if number % 2 == which]).mean() for which in (1, 0))
        return {"eval/lead": float(good - bad)}


class NullSync:
    def run(self, version: int) -> NullSync:
        return self

    def serving(self, version: int, work: Callable[[], T]) -> T:
        return run_on_rank0(work)

    def metrics(self) -> dict[str, float]:
        return {}


class NullCheckpointManager:
    def write(self, mark: TrainState, last: bool) -> None: ...

    def poll(self) -> None: ...

    def wait(self) -> None: ...


class RecordingLog:
    """What a RunLog is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.samples_seen: list[dict[str, Any]] = []

    def set_phase(self, phase: str) -> None: ...

    def write_step(self, metrics: dict[str, float]) -> None:
        self.rows.append(metrics)

    def write_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.samples_seen += rows


def run_loop(
    folder: Path,
    precision: dict[str, Any],
    algorithm: dict[str, Any],
    steps: int,
    noise: float,
    attribute_every: int = 0,
    said: float | None = None,
    worker_class: type[ScriptedWorker] = ScriptedWorker,
) -> dict[str, Any]:
    """The rows of the log and the advantages of the last step's samples."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3, "steps": steps})
    config = Config.model_validate(
        {
            "model": {"path": folder}, "precision": precision, "train": {"steps": steps}, "algorithm": algorithm, "data": {"eval_every": 1},
            "rollout": {"prompts_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8},
            "log": {"samples": GROUPS * SIZE, "attribute_every": attribute_every},
        }
    )  # fmt: skip
    reference = None
    if config.algorithm.kl_coef:
        model = freeze(build_model(trainer.hf_config, trainer.layout, trainer.contract))
        load_checkpoint(model, folder, trainer.shards)
        reference = Policy(model, 1.0, 4)
    log = RecordingLog()
    causes = MismatchAttribution(trainer.actor, trainer.collect_named_tensors, trainer.contract.activation_format)
    worker = worker_class(trainer.actor, noise, said)
    Loop(config, trainer.actor, reference, NullSync(), worker, log, NullCheckpointManager(), causes).run()
    return {"rows": log.rows, "advantages": [row["advantage"] for row in log.samples_seen[-GROUPS * SIZE :]]}
