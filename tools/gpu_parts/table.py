"""The results as JSON and as a Markdown page. Pure: the same outcomes give the same text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_parts.found import Machine
from gpu_parts.outcome import Outcome
from gpu_parts.targets import reached

_MARKS = {True: "ok", False: "**FAILED**", None: ""}


def file_name(gpu: str, date: str) -> str:
    """`h200-2026-11-21` of `NVIDIA H200`."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    return f"{slug or 'gpu'}-{date}"


def write(folder: Path, machine: Machine, outcomes: Sequence[Outcome], about: dict[str, Any]) -> Path:
    """Writes NAME.json and NAME.md, never over older ones; returns the Markdown page. `about` holds `date` and more to be told."""
    folder.mkdir(parents=True, exist_ok=True)
    name = unused = file_name(machine.gpu or "", about["date"])
    number = 2
    while (folder / f"{unused}.json").exists():
        unused, number = f"{name}-{number}", number + 1
    told = {**about, "machine": asdict(machine), "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{unused}.json").write_text(json.dumps(told, indent=1) + "\n")
    page = folder / f"{unused}.md"
    page.write_text(markdown(machine, outcomes, about))
    return page


def markdown(machine: Machine, outcomes: Sequence[Outcome], about: dict[str, Any]) -> str:
    """The summary first, then every row of every part."""
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if version)
    lines = [
        f"# {machine.gpu}, {about['date']}",
        "",
        f"`bash tools/gpu_check.sh` at commit {about['commit']}, {about['seconds']:.0f} s. {machine.memory_gib} GiB, driver "
        f"{machine.driver}, torch built for CUDA {machine.cuda}, nvcc {machine.nvcc or 'not found'}, Python {machine.python}.",
        "",
        f"Packages: {packages}.",
        "",
        *summary_table(outcomes),
        *targets_table(outcomes),
    ]
    for outcome in outcomes:
        if outcome.rows or outcome.log:
            lines += ["", f"## {outcome.title}", ""]
        if outcome.rows:
            lines += ["| what | | found |", "|---|---|---|"]
            lines += [f"| {_cell(row.what)} | {_MARKS[row.ok]} | {_cell(row.found)} |" for row in outcome.rows]
        if outcome.log:
            lines += ["", "Its last lines:", "", *(f"    {line}" for line in outcome.log.splitlines())]
    return "\n".join(lines) + "\n"


def summary_table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per part; what was missing is named."""
    lines = ["| part | status | s | rows | why, and what was missing |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        told = [outcome.why] * bool(outcome.why) + [f"without {', '.join(outcome.missing)}"] * bool(outcome.missing)
        lines.append(f"| {outcome.title} | {outcome.status} | {outcome.seconds:.0f} | {len(outcome.rows)} | {_cell('; '.join(told))} |")
    return lines


def targets_table(outcomes: Sequence[Outcome]) -> list[str]:
    """The figures to beat beside what was measured; nothing where nothing was."""
    found = [row for outcome in outcomes for row in reached(outcome.rows)]
    if not found:
        return []
    lines = ["", "## Against the figures to beat", "", "| figure | measured as | reached | to beat | |", "|---|---|---|---|---|"]
    return lines + [f"| {target} | {_cell(what)} | {ratio:.2f} | {to_beat:.2f} | {told} |" for target, what, ratio, to_beat, told in found]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
