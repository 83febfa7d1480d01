"""What the console says after a run: what it showed, where the report is, and a command that continues from its result."""

import shlex
import sys
from pathlib import Path

from megatron_rl.metrics import MetricValue
from megatron_rl.observability.run_folder import read_metrics
from megatron_rl.reporting.formatting import format_value
from megatron_rl.reporting.report import headline


def closing_lines(run_dir: Path) -> list[str]:
    """Return three lines about a finished run. Raise UserError("RUN_DIR") if `run_dir` has no readable run."""
    page, checkpoints = run_dir / "report.html", sorted((run_dir / "checkpoints").glob("step_*[0-9]"))
    if checkpoints:
        following: tuple[str, ...] = ("export", "--checkpoint", str(checkpoints[-1]), "--output", str(run_dir / "hf"))
    else:
        following = ("report", str(run_dir))
    return [
        f"result: {_describe(read_metrics(run_dir))}",
        f"report: {page if page.exists() else f'none, see {run_dir}'}",
        f"next:   {shlex.join((*_program(), *following))}{'   # a Hugging Face checkpoint' * bool(checkpoints)}",
    ]


def _describe(rows: list[dict[str, MetricValue]]) -> str:
    """Return held-out accuracy before and after, the largest mismatch, and the tensors whose equality was proved."""
    parts = [headline(rows).removesuffix(".")]
    if differences := [row["mismatch/abs_max"] for row in rows if "mismatch/abs_max" in row]:
        largest = "not finite" if None in differences else f"{format_value(max(filter(None, differences), default=0.0), 'small')} nats"
        parts.append(f"largest mismatch of trainer and engine {largest}")
    if syncs := [row for row in rows if row.get("sync/tensors") is not None]:
        tensors, proved = (int(sum(row.get(f"sync/{name}") or 0 for row in syncs)) for name in ("tensors", "proved"))
        parts.append(f"{proved:,} of {tensors:,} tensors proved equal in {len(syncs)} sync{'s' * (len(syncs) != 1)}")
    return "; ".join(parts)


def _program() -> tuple[str, ...]:
    """Return the words that start this program again from the current folder."""
    program = Path(sys.executable).with_name("megatron-rl")
    if not program.exists():
        return sys.executable, "-m", "megatron_rl"
    return (str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else str(program),)
