"""Console output of a run: one line per step, and a progress bar on a terminal.

Each line is a rich `Text`: terminals show its colors, and log files get the plain text.
"""

import atexit
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from megatron_rl.metrics import STEP_SECONDS, MetricValue, describe


def proof_verdict(metrics: Mapping[str, MetricValue]) -> tuple[str, bool]:
    """Return the verdict on a row's sync and whether it is good, e.g. ("28/28 tensors, 2.6/2.6 MB, proof ok", True), or ("", True) without
    a sync. Rows of earlier releases count only tensors."""
    tensors, proved = metrics.get("sync/tensors"), metrics.get("sync/proved")
    if tensors is None:
        return "", True
    if proved is None:
        return f"{tensors:.0f} tensors, NOT PROVED", False
    nbytes, proved_bytes = (metrics.get(f"sync/{name}") for name in ("engine_bytes", "proved_bytes"))
    equal, counts = proved == tensors and proved_bytes == nbytes, f"{proved:.0f}/{tensors:.0f} tensors, "
    if nbytes is not None:
        counts += f"{(proved_bytes or 0) * 1e-6:.1f}/{nbytes * 1e-6:.1f} MB, "
    age = metrics.get("sync/proof_age")
    return counts + ("proof ok" if equal else "PROOF FAILED") + (f", reread {age:.0f} syncs ago" if age else ""), equal


def progress_line(metrics: Mapping[str, MetricValue], total_steps: int, seconds_left: float = 0) -> Text:
    """Return the console line of a step: metrics that declare a `progress` format, in the order of the row, then seconds, the sync, and
    the time left, if any. Values that are not finite (None) are marked."""
    parts, phases = [Text(f"step {metrics['step']}/{total_steps or '?'}", "bold")], []

    def add(name: str, form: str, scale: float = 1) -> None:
        if name in metrics:
            value = metrics[name]
            parts.append(Text(f"{name} NOT FINITE", "bold red") if value is None else Text.from_markup(form.format(value * scale)))

    for name, value in metrics.items():
        metric = describe(name)
        if metric and metric.progress:
            add(name, metric.progress)
        if metric and STEP_SECONDS in metric.panels and value is not None:
            phases.append(f"{metric.label} {value:.1f}")
    add("time/step", "[dim]{:.1f} s" + (f" ({', '.join(phases)})" if phases else ""))
    add("sync/bytes", "sync {:.1f} MB", 1e-6)
    failed = metrics.get("draws/failed")
    parts += [Text(f"{failed:.0f} TESTS OF THE DRAWS FAILED", "bold red")] if failed else []
    verdict, good = proof_verdict(metrics)
    parts += [Text(verdict, "green" if good else "bold red")] if verdict else []
    return Text("  ").join([*parts, *([Text(f"{format_left(seconds_left)} left", "dim")] if seconds_left else [])])


def format_left(seconds: float) -> str:
    """Return an estimated duration as text, such as "45 s", "12 min" or "3.5 h"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class ProgressDisplay:
    """Prints lines. On a terminal, a progress bar below them shows phase, steps, and times."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            phase = TextColumn("{task.description}", markup=False)
            columns = (phase, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            # Other output (engine, libraries) must bypass rich, or the bar could hide errors.
            self._bar = Progress(*columns, console=self._console, redirect_stdout=False, redirect_stderr=False, transient=True)
            self._task = self._bar.add_task("starting", total=total_steps or None)
            self._bar.start()
            atexit.register(self.close)  # restores the cursor however the program ends

    def print_line(self, text: Text | str) -> None:
        """Print one line without wrapping it. Characters that the console cannot encode are escaped."""
        if isinstance(text, str):
            text = text.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()

    def set_phase(self, phase: str) -> None:
        """Show the phase on the progress bar, if any."""
        if self._bar:
            self._bar.update(self._task, description=phase)

    def set_step(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Remove the progress bar. Idempotent."""
        if self._bar:
            self._bar.stop()
            self._bar = None
            atexit.unregister(self.close)
