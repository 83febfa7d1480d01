"""Train the same run twice, once undisturbed and once under random kills of engines and trainer. Both must end with the same bits.

    python tools/checks/soak.py --steps 200 --kills 12
    python tools/checks/soak.py --plan            # print what would be killed when, and run nothing
    python tools/checks/soak.py --compare A B     # two finished runs
    python tools/checks/soak.py --placement.kind=disaggregated --placement.max_staleness=2 --rollout.engines=2 ...

A run that samples ahead of the trainer (`placement.max_staleness`) or over-samples is not the same twice: it is trained once, under kills,
and its record must show every problem trained on once, in order (`sample_record.py`).

A trainer that was killed is started again by the same command, with checkpoint.resume=auto; the run itself restarts an engine that was
killed. Prints for every kill the seconds until the next step was recorded, and exits with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from sample_record import find_faults

from megatron_rl.config import Config, load_config
from megatron_rl.observability.run_log import read_jsonl

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.05
_IGNORED = ("time", "second", "memory/", "engine/restarts")


@dataclass
class Kill:
    """`victim` is killed `delay` seconds after `step` was recorded; `seconds`: from then until a row of a later step was. Of several
    engines one is killed, that of number `engine` among those that run, or all."""

    step: int
    victim: str
    delay: float
    engine: int = 0
    seconds: float | None = None


def plan_kills(steps: int, kills: int, seed: int, engines: int) -> list[Kill]:
    """Draw distinct steps, in order; engine, all of several engines, and trainer alike often."""
    generator = random.Random(seed)
    chosen = sorted(generator.sample(range(steps - 1), kills))
    victims = ("engine", "trainer") if engines == 1 else ("engine", "all engines", "trainer")
    return [Kill(step, generator.choice(victims), generator.uniform(0, 5), generator.randrange(engines)) for step in chosen]


class SoakRun:
    """One run, by as many commands as it takes."""

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
        """Return the rows recorded so far, without a line that is still being written."""
        return read_jsonl(self.folder / "metrics.jsonl")[0]

    def ended(self) -> bool:
        return self._process.poll() is not None

    def finished(self) -> bool:
        """Raise RuntimeError where the command ended by itself before the run was finished."""
        if self._process.poll():
            raise RuntimeError(f"the run ended with exit code {self._process.returncode}; see {self._console}")
        return self.ended()

    def kill(self, kill: Kill) -> bool:
        """Return False where there is no such process at the moment."""
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
    """Return whether this is an engine's server, which has forked its other processes."""
    try:
        parent = process.parent()
        return "rollout_sglang.server" in process.cmdline() and (parent is None or "rollout_sglang.server" not in parent.cmdline())
    except psutil.NoSuchProcess:
        return False


def run_with_kills(run: SoakRun, kills: list[Kill]) -> None:
    """Run to the end. Each kill happens once, and only after the run has recorded a step since the kill before it."""
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
        kill.seconds = time.time() - start
        print(f"step {last:>4}: {kill.victim} killed, next step recorded after {kill.seconds:.1f} s", flush=True)
    while not run.finished():
        time.sleep(_POLL_SECONDS)


def find_differences(run: Path, other: Path) -> list[str]:
    """Compare two finished runs: rows without their times, and the bytes of the last checkpoint."""
    folders = (run, other)
    rows = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders]
    if [row["step"] for row in rows[0]] != [row["step"] for row in rows[1]]:
        return [f"{len(rows[0])} rows and {len(rows[1])}"]
    differing = [(row["step"], name) for row, other_row in zip(*rows, strict=True) for name in _differing_keys(row, other_row)]
    differences = [f"step {step}: {name}" for step, name in differing if not any(word in name for word in _IGNORED)]
    checkpoints = [max((folder / "checkpoints").glob("step_*")) for folder in folders]  # the last
    files = [json.loads((checkpoint / "state.json").read_text())["files"] for checkpoint in checkpoints]
    for digests in files:
        digests.pop("mcore/.metadata", None)  # names its own folder
    return differences + [f"checkpoint: {name}" for name in _differing_keys(*files)]


def _differing_keys(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.toml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--plan", action="store_true", help="print the kills and run nothing")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="RUN", help="compare two finished runs and run nothing")
    options, overrides = parser.parse_known_args()
    if options.compare:
        return report_differences(*options.compare)
    model_settings = tuple(word for word in overrides if word.startswith(("--architecture.", "--warm_start.")))
    overrides = [word for word in overrides if word not in model_settings]
    config: Config = load_config(options.config, overrides)
    kills = plan_kills(options.steps, options.kills, options.seed, config.rollout.engines)
    if options.plan:
        print(json.dumps([asdict(kill) for kill in kills], indent=1))
        return 0
    folder = options.folder.resolve()
    overrides += [f"--checkpoint.every={options.every}", f"--model.path={folder / 'model'}"]
    subprocess.run(
        [sys.executable, "-m", "examples.arithmetic.warm_start", str(options.config.resolve()), *overrides, *model_settings],
        cwd=ROOT,
        check=True,
    )
    if not repeats(config):
        overrides.append(f"--log.samples={config.rollout.prompts_per_step * config.rollout.group_size}")
    straight, killed = (SoakRun(folder / name, options.config.resolve(), options.steps, overrides) for name in ("straight", "fired"))
    if repeats(config):
        straight.start()
    while repeats(config) and not straight.finished():
        time.sleep(1)
    run_with_kills(killed, kills)
    for victim in ("engine", "all engines", "trainer"):
        times = sorted(kill.seconds for kill in kills if kill.victim == victim and kill.seconds is not None)
        if times:
            median, longest = times[len(times) // 2], times[-1]
            print(f"{victim}: killed {len(times)} times; to the next step: median {median:.1f} s, longest {longest:.1f} s")
    return report_differences(straight.folder, killed.folder) if repeats(config) else report_faults(killed.folder)


def repeats(config: Config) -> bool:
    """Return whether a second run would be the same, bit for bit."""
    return not config.placement.max_staleness and not config.rollout.over_sampling_prompts


def report_faults(run: Path) -> int:
    """Print the first 20 faults of a run's record; return 1 where there are any."""
    faults = find_faults(run)
    print("wrong:", *faults[:20], sep="\n  ") if faults else print("every problem was trained on once, in order; no mismatch")
    return 1 if faults else 0


def report_differences(run: Path, other: Path) -> int:
    """Print the first 20 differences; return 1 where there are any."""
    differences = find_differences(run, other)
    print("different:", *differences[:20], sep="\n  ") if differences else print("rows and checkpoint are the same, bit for bit")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
