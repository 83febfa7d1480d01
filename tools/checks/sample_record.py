"""Did a run train on every problem once? Its record of samples against the order of its problems.

A run that samples ahead of the trainer is not the same twice, so it cannot be compared with one that nothing happened to. What it promises
holds by itself: problems are drawn in one order, and each is trained on exactly once or still owed by the last checkpoint; a step's groups
are whole; no token is older than `placement.max_staleness`; trainer and engine agree to the bit on tokens of the trainer's own version.
The run must record all its samples (`log.samples`).
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.observability.run_log import read_jsonl, read_run


@dataclass(frozen=True)
class Promise:
    """What the samples of a run must be."""

    problems: Sequence[str]
    """Ids in the order of the problems, of all that were drawn."""
    owed: frozenset[int]
    """Positions in it that were drawn and not trained on, by the last checkpoint."""
    steps: int
    prompts: int
    group_size: int
    max_staleness: int

    @classmethod
    def of_run(cls, run: Path) -> Promise:
        from megatron_rl.data import load_problems  # seconds of imports
        from megatron_rl.hf.tokenizer import load_tokenizer

        config = Config.model_validate_json(json.dumps(read_run(run)["config"]))
        checkpoint = max((run / "checkpoints").glob("step_*"))
        state = json.loads((checkpoint / "state.json").read_text())
        stream, _ = load_problems(config, load_tokenizer(config.model.path))
        problems = [problem.id for problem in stream.next_batch(state["data"]["position"])]
        owed, rollout = frozenset(state["data"].get("left_out", ())), config.rollout
        return cls(problems, owed, state["step"], rollout.prompts_per_step, rollout.group_size, config.placement.max_staleness)


def find_faults(run: Path) -> list[str]:
    """Return what is wrong with a finished run's record, in words; [] where it keeps all promises."""
    return [
        *find_wrong_samples(read_jsonl(run / "samples.jsonl")[0], Promise.of_run(run)),
        *find_inexact(read_jsonl(run / "metrics.jsonl")[0]),
    ]


def find_wrong_samples(samples: Iterable[dict[str, Any]], promise: Promise) -> list[str]:
    """Return what is wrong with the rows of samples.jsonl. A problem that the order repeats counts as often as it is there."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in samples:
        by_step[row["step"]].append(row)
    if sorted(by_step) != [*range(1, promise.steps + 1)]:
        return [f"samples of steps {sorted(by_step)}, not of 1 to {promise.steps}"]
    faults, trained = list[str](), list[list[int]]()
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for position, name in enumerate(promise.problems):
        waiting[name].append(position)
    for step, rows in sorted(by_step.items()):
        groups = [rows[start : start + promise.group_size] for start in range(0, len(rows), promise.group_size)]
        if len(rows) != promise.prompts * promise.group_size or any(len({row["problem"] for row in group}) > 1 for group in groups):
            faults.append(f"step {step}: {len(rows)} samples, not {promise.prompts} whole groups of {promise.group_size}")
        names = [group[0]["problem"] for group in groups]
        faults += [f"step {step}: {name} was trained on before, or never drawn" for name in names if not waiting[name]]
        trained.append([waiting[name].popleft() for name in names if waiting[name]])
        oldest, newest = (pick(row["versions"][index] for row in rows) for index, pick in enumerate((min, max)))
        if not step - 1 - promise.max_staleness <= oldest <= newest <= step - 1:
            faults.append(f"step {step}: tokens of versions {oldest} to {newest}")
    seen = {position for positions in trained for position in positions}
    for position in sorted(seen & promise.owed):
        faults.append(f"problem {position} ({promise.problems[position]}) was trained on and is owed still")
    for position in sorted({*range(len(promise.problems))} - seen - promise.owed):
        faults.append(f"problem {position} ({promise.problems[position]}) is lost")
    return faults + _find_disorder(trained, promise.max_staleness)


def _find_disorder(trained: list[list[int]], max_staleness: int) -> list[str]:
    """Return where the order is not that of drawing: an aborted problem is in the first step that is drawn after, and not aborted again."""
    faults, latest = list[str](), list[int]()
    for step, positions in enumerate(trained, 1):
        if positions != sorted(positions):
            faults.append(f"step {step}: problems in the order {positions}")
        for position in positions:
            passed = next((number for number, last in enumerate(latest, 1) if last > position), step)
            if step - passed > max_staleness + 1:
                faults.append(f"step {step}: problem {position} comes {step - passed} steps after a later one")
        latest.append(max(positions, default=-1))
    return faults


def find_inexact(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows in which trainer and engine differ on tokens of the trainer's own version, or a tensor is not proved."""
    measured = [row for row in rows if "mismatch/abs_max" in row]
    faults = [f"step {row['step']}: mismatch of {row['mismatch/abs_max']}" for row in measured if row["mismatch/abs_max"] != 0]
    faults += [f"step {row['step']}: not proved" for row in rows if row["sync/proved"] != row["sync/tensors"]]
    return faults if measured else [*faults, "no token of the trainer's own version was compared"]
