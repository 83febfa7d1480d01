"""Train a run while engines and trainer are killed at random, and check that every problem was trained on exactly once.

    python tools/soak.py [--config FILE] [--steps N] [--kills N] [--every N] [--seed N] [--folder DIR] [--section.key=value ...]

A killed trainer is started again by the same command. Afterward the run's records must show: each problem that was drawn was trained on
once, in order, or is still owed according to the last checkpoint; groups are whole; no token is older than `placement.max_staleness`; the
mismatch is 0 on tokens of the trainer's own version; and every sync was proved. The exit code is 1 if any of this is violated.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config, load_config
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.observability.run_folder import METRICS, read_jsonl, read_run

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.05


@dataclass
class Kill:
    """A kill of `victim`, `delay` seconds after `step` was recorded. `engine` is the index of the killed engine among the running ones."""

    step: int
    victim: str
    delay: float
    engine: int


def plan_kills(steps: int, kills: int, seed: int, engines: int) -> list[Kill]:
    """Draw distinct steps in increasing order, with equally likely victims."""
    generator = random.Random(seed)
    chosen = sorted(generator.sample(range(steps - 1), kills))
    victims = ("engine", "trainer") if engines == 1 else ("engine", "all engines", "trainer")
    return [Kill(step, generator.choice(victims), generator.uniform(0, 5), generator.randrange(engines)) for step in chosen]


class SoakRun:
    """A run that is started again after its trainer was killed."""

    def __init__(self, folder: Path, config: Path, steps: int, overrides: list[str]) -> None:
        self.folder, self._console = folder / "latest", folder / "console.log"
        folder.mkdir(parents=True, exist_ok=True)
        options = [f"--train.steps={steps}", f"--log.dir={folder}", "--checkpoint.resume=auto"]
        self._command = [sys.executable, "-m", "megatron_rl", "train", str(config), *options, *overrides]
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "metrics.jsonl", METRICS)[0]

    def ended(self) -> bool:
        return self._process.poll() is not None

    def finished(self) -> bool:
        """Return whether the run is finished. Raise RuntimeError if it failed."""
        if self._process.poll():
            raise RuntimeError(f"the run ended with exit code {self._process.returncode}; see {self._console}")
        return self.ended()

    def kill(self, kill: Kill) -> bool:
        """Return False if no such process is running."""
        trainer = psutil.Process(self._process.pid)
        if kill.victim == "trainer":
            trainer.kill()
            self._process.wait()
            return True
        servers = [child for child in trainer.children(recursive=True) if _is_server(child)]
        for server in servers if kill.victim == "all engines" else servers[kill.engine :][:1] or servers[:1]:
            server.kill()
        return bool(servers)


def _is_server(process: psutil.Process) -> bool:
    """Return whether the process is an engine's server, the parent of the engine's other processes."""
    try:
        parent = process.parent()
        return "rollout_sglang.server" in process.cmdline() and (parent is None or "rollout_sglang.server" not in parent.cmdline())
    except psutil.NoSuchProcess:
        return False


def run_with_kills(run: SoakRun, kills: list[Kill]) -> None:
    """Run to the end and print the seconds from each kill to the next recorded step. At least one step is recorded between kills."""
    run.start()
    for kill in kills:
        while not run.finished() and not any(row["step"] >= kill.step for row in run.rows()):
            time.sleep(_POLL_SECONDS)
        time.sleep(kill.delay)
        if run.ended():
            return
        last, start = run.rows()[-1]["step"], time.time()
        if not run.kill(kill):
            continue
        if run.ended():
            run.start()
        while not run.finished() and not any(row["step"] > last and row["unix_time"] > start for row in run.rows()):
            time.sleep(_POLL_SECONDS)
        print(f"step {last:>4}: {kill.victim} killed, next step recorded after {time.time() - start:.1f} s", flush=True)
    while not run.finished():
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class Promise:
    """What the sample records of a run must satisfy."""

    problems: Sequence[str]
    """Ids of all problems that were drawn, in order."""
    owed: frozenset[int]
    """Indices into `problems` of those that were not trained on, according to the last checkpoint."""
    steps: int
    prompts: int
    group_size: int
    max_staleness: int

    @classmethod
    def of_run(cls, run: Path) -> Promise:
        from megatron_rl.data import load_problems  # takes seconds to import
        from megatron_rl.hf.tokenizer import load_tokenizer

        config = Config.model_validate_json(json.dumps(read_run(run)["config"]))
        checkpoint = max((run / "checkpoints").glob("step_*"))
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        stream, _ = load_problems(config, load_tokenizer(config.model.path))
        problems = [problem.id for problem in stream.next_batch(state["data"]["position"])]
        owed, rollout = frozenset(state["data"].get("left_out", ())), config.rollout
        return cls(problems, owed, state["step"], rollout.prompts_per_step, rollout.group_size, config.placement.max_staleness)


def find_faults(run: Path) -> list[str]:
    """Return a line for each violated promise of a finished run, which must have recorded all its samples (`log.samples`)."""
    samples, rows = read_jsonl(run / "samples.jsonl")[0], read_jsonl(run / "metrics.jsonl", METRICS)[0]
    return find_wrong_samples(samples, Promise.of_run(run)) + find_inexact(rows)


def find_wrong_samples(samples: Iterable[dict[str, Any]], promise: Promise) -> list[str]:
    """Check the rows of samples.jsonl. A problem may occur as often as it was drawn."""
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
        faults.append(f"problem {position} ({promise.problems[position]}) was trained on and is still owed")
    for position in sorted({*range(len(promise.problems))} - seen - promise.owed):
        faults.append(f"problem {position} ({promise.problems[position]}) is lost")
    return faults + _find_disorder(trained, promise.max_staleness)


def _find_disorder(trained: list[list[int]], max_staleness: int) -> list[str]:
    """Check the order. An aborted problem must be in the first step drawn after it was aborted."""
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
    """Check the rows of metrics.jsonl for a mismatch on tokens of the trainer's own version and for tensors that were not proved."""
    measured = [row for row in rows if "mismatch/abs_max" in row]
    faults = [f"step {row['step']}: mismatch of {row['mismatch/abs_max']}" for row in measured if row["mismatch/abs_max"] != 0]
    faults += [f"step {row['step']}: not proved" for row in rows if row["sync/proved"] != row["sync/tensors"]]
    return faults if measured else [*faults, "no token of the trainer's own version was compared"]


def main(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="TOML file of the run; --section.key=value may follow.")] = ROOT / "configs/quickstart.toml",
    steps: Annotated[int, typer.Option(help="Steps of the run.")] = 200,
    kills: Annotated[int, typer.Option(help="Number of kills.")] = 12,
    every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the kills.")] = 0,
    folder: Annotated[Path, typer.Option(help="Folder of the model and of the run.")] = Path("runs/soak"),
) -> None:
    """Train a run under random kills and check its records."""
    config, folder = config.resolve(), folder.resolve()
    model_settings = [word for word in context.args if word.startswith(("--architecture.", "--warm_start."))]
    overrides = [word for word in context.args if word not in model_settings]
    rollout: RolloutConfig = load_config(config, overrides).rollout
    overrides += [f"--checkpoint.every={every}", f"--model.path={folder / 'model'}"]
    warm_start = [sys.executable, "-m", "examples.arithmetic.warm_start", str(config), *overrides, *model_settings]
    subprocess.run(warm_start, cwd=ROOT, check=True)
    run = SoakRun(folder / "fired", config, steps, [*overrides, f"--log.samples={rollout.prompts_per_step * rollout.group_size}"])
    run_with_kills(run, plan_kills(steps, kills, seed, rollout.engines))
    faults = find_faults(run.folder)
    print("wrong:", *faults[:20], sep="\n  ") if faults else print("every problem was trained on once, in order; no mismatch")
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    run_script(main)
