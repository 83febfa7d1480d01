"""Checks and measures the GPU tier on this machine; tools/gpu_check.sh starts it. Needs nothing but Python to say what is missing.

Each part (`gpu_parts.parts`) is a process of its own with a time limit of its own; one that fails, hangs or crashes never stops the others.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_parts import outcome, table
from gpu_parts.found import Machine, find, fix
from gpu_parts.outcome import Outcome
from gpu_parts.parts import PARTS, TOTAL_SECONDS, Part
from gpu_parts.targets import reached

ROOT = Path(__file__).parents[1]
_LEAST_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse(arguments)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    machine = find()
    if options.dry_run:
        print("\n".join(plan(machine, parts)))
        return 0
    if machine.gpu is None:
        print(f"gpu_check: no NVIDIA GPU here, {machine.why_no_gpu}; --dry-run lists the parts and what each lacks", file=sys.stderr)
        return 2
    start = time.monotonic()
    outcomes = run_all(machine, parts, start + TOTAL_SECONDS)
    about = {"date": datetime.date.today().isoformat(), "commit": commit(), "seconds": time.monotonic() - start}
    page = table.write(options.out, machine, outcomes, about)
    print("\n".join(summary(outcomes)))
    print(f"{page} and {page.with_suffix('.json').name}, {about['seconds']:.0f} s")
    return int(any(found.status in ("failed", "timed out") for found in outcomes))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends with 2 and a line for bad options."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser("gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="list the parts and what each lacks; runs nothing")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {','.join(names)}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of the results")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only if name not in names]:
        parser.exit(2, f"gpu_check: --only = '{unknown[0]}': is none of {', '.join(names)}\n")
    return options


def plan(machine: Machine, parts: Sequence[Part]) -> list[str]:
    """What would run here: a line per part, below it what it lacks, and at the end how to get that."""
    here = f"{machine.gpu}, driver {machine.driver}" if machine.gpu else f"no NVIDIA GPU: {machine.why_no_gpu}"
    lines = [f"{here}; at most {TOTAL_SECONDS} s in all"]
    for part in parts:
        needs, uses = machine.lacks(part.needs), machine.lacks(part.uses)
        lines.append(f"{part.name}: {part.title}, at most {part.seconds} s; {'would be left out' if needs else 'would run'}")
        lines += [f"    needs {', '.join(needs)}"] * bool(needs) + [f"    would use {', '.join(uses)}"] * bool(uses)
    lacks = dict.fromkeys(lack for part in parts for lack in machine.lacks((*part.needs, *part.uses)))
    return lines + [f"{lack} is missing: {fix(lack)}" for lack in lacks]


def run_all(machine: Machine, parts: Sequence[Part], deadline: float) -> list[Outcome]:
    """All parts in order, none beyond `deadline` (of time.monotonic). Ctrl-C ends the part that runs and leaves out the others."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        try:
            for part in parts:
                found.append(run_one(machine, part, Path(folder), deadline - time.monotonic()))
                print(f"{found[-1].status:9} {found[-1].seconds:4.0f} s  {part.title}", flush=True)
        except KeyboardInterrupt:
            found += [Outcome(part.name, part.title, "left out", why="interrupted") for part in parts[len(found) :]]
    return found


def run_one(machine: Machine, part: Part, folder: Path, seconds_left: float) -> Outcome:
    if lacks := machine.lacks(part.needs):
        return Outcome(part.name, part.title, "left out", why=f"needs {', '.join(f'{lack} ({fix(lack)})' for lack in lacks)}")
    if seconds_left < _LEAST_SECONDS:
        return Outcome(
            part.name, part.title, "left out", why=f"the {TOTAL_SECONDS} s of the whole check are over; --only {part.name} runs it"
        )
    return outcome.run(part, folder, min(part.seconds, seconds_left), machine.lacks(part.uses))


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """For the console: a line per part that did not pass, what was missing anywhere, the figures to beat, and the count."""
    lines = [f"{found.status}: {found.title}: {found.why}" for found in outcomes if found.status != "passed"]
    missing = dict.fromkeys(lack for found in outcomes for lack in found.missing)
    lines += [f"rows left out without {lack}: {fix(lack)}" for lack in missing]
    figures = [row for found in outcomes for row in reached(found.rows)]
    lines += [f"{target}: {ratio:.2f} ({what}); to beat {to_beat:.2f}: {told}" for target, what, ratio, to_beat, told in figures]
    passed = sum(found.status == "passed" for found in outcomes)
    return [*lines, f"{passed} of {len(outcomes)} parts passed"]


def commit() -> str:
    """Short commit of this checkout, `unknown` outside of git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
