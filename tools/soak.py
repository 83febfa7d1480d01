"""Trains the same run twice, once undisturbed and once under fire: random kills of engine and trainer. Both must end with the same bits.

    python tools/soak.py --steps 200 --kills 12

A trainer that was killed is started again by the same command, with checkpoint.resume=auto; an engine that was killed is the run's own
affair. Prints for every kill the seconds until the next step was recorded, and exits with 1 where rows or checkpoints differ.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.05
_IGNORED = ("time", "second", "memory/", "engine/restarts")


@dataclass
class Kill:
    """`victim` is killed `delay` seconds after `step` was recorded; `seconds`: from then until a row of a later step was."""

    step: int
    victim: str
    delay: float
    seconds: float | None = None


def plan(steps: int, kills: int, seed: int) -> list[Kill]:
    """Distinct steps, in order; engine and trainer alike often."""
    chosen = random.Random(seed)
    return [
        Kill(step, chosen.choice(("engine", "trainer")), chosen.uniform(0, 5)) for step in sorted(chosen.sample(range(steps - 1), kills))
    ]


class SoakRun:
    """One run, by as many commands as it takes."""

    def __init__(self, folder: Path, config: Path, steps: int, overrides: list[str]) -> None:
        self.folder, self._console = folder / "latest", folder / "console.log"
        folder.mkdir(parents=True, exist_ok=True)
        own = [f"--train.steps={steps}", f"--log.dir={folder}", "--checkpoint.resume=auto"]
        self._command = [sys.executable, "-m", "megatron_rl", "train", str(config), *own, *overrides]
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def rows(self) -> list[dict[str, Any]]:
        """What is recorded by now; a line that is being written is left out."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []

    def ended(self) -> bool:
        return self._process.poll() is not None

    def finished(self) -> bool:
        """Raises RuntimeError where the command ended by itself before the run was finished."""
        if self._process.poll():
            raise RuntimeError(f"the run ended with exit code {self._process.returncode}; see {self._console}")
        return self.ended()

    def kill(self, victim: str) -> bool:
        """False where there is no such process at the moment."""
        trainer = psutil.Process(self._process.pid)
        if victim == "trainer":
            trainer.kill()
            self._process.wait()
            return True
        servers = [below for below in trainer.children(recursive=True) if "rollout_sglang.server" in below.cmdline()]
        for server in servers:
            server.kill()
        return bool(servers)


def run_with_kills(run: SoakRun, kills: list[Kill]) -> None:
    """Runs to the end; each kill happens once, and the next one is looked at when the run has recorded a step again."""
    run.start()
    for kill in kills:
        while not run.finished() and not any(row["step"] >= kill.step for row in run.rows()):
            time.sleep(_POLL_SECONDS)
        time.sleep(kill.delay)
        if run.ended():
            return
        last, start = run.rows()[-1]["step"], time.time()
        if not run.kill(kill.victim):
            continue
        if run.ended():
            run.start()
        while not run.finished() and not any(row["step"] > last and row["unix_time"] > start for row in run.rows()):
            time.sleep(_POLL_SECONDS)
        kill.seconds = time.time() - start
        print(f"step {last:>4}: {kill.victim} killed, next step recorded after {kill.seconds:.1f} s", flush=True)
    while not run.finished():
        time.sleep(_POLL_SECONDS)


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs do not share: rows without their times, and the bytes of the last checkpoint."""
    found = []
    rows = [[drop_times(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    if [row["step"] for row in rows[0]] != [row["step"] for row in rows[1]]:
        return [f"{len(rows[0])} rows and {len(rows[1])}"]
    for mine, theirs in zip(*rows, strict=True):
        found += [f"step {mine['step']}: {name}" for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    files = [json.loads((last_checkpoint(run) / "state.json").read_text())["files"] for run in (one, other)]
    for held in files:
        held.pop("mcore/.metadata", None)  # names its own folder
    return found + [f"checkpoint: {name}" for name in sorted(files[0].keys() | files[1].keys()) if files[0].get(name) != files[1].get(name)]


def drop_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(word in name for word in _IGNORED)}


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.toml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parsed, overrides = parser.parse_known_args()
    overrides += [f"--checkpoint.every={parsed.every}", f"--model.path={parsed.folder.resolve() / 'model'}"]
    straight, fired = (
        SoakRun(parsed.folder.resolve() / name, parsed.config.resolve(), parsed.steps, overrides) for name in ("straight", "fired")
    )
    straight.start()
    while not straight.finished():
        time.sleep(1)
    kills = plan(parsed.steps, parsed.kills, parsed.seed)
    run_with_kills(fired, kills)
    for victim in ("engine", "trainer"):
        times = sorted(kill.seconds for kill in kills if kill.victim == victim and kill.seconds is not None)
        if times:
            print(
                f"{victim}: killed {len(times)} times; to the next step: median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s"
            )
    found = differences(straight.folder, fired.folder)
    print("different:", *found[:20], sep="\n  ") if found else print("rows and checkpoint are the same, bit for bit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
