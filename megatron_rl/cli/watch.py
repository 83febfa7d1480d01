"""`megatron-rl watch`: a live view of a run in a terminal, read from its folder alone, on any machine that sees it."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.metrics import MetricValue, describe, read_declarations
from megatron_rl.observability.console import proof_verdict
from megatron_rl.observability.hang_watchdog import RankStatus, describe_ranks, read_rank_status
from megatron_rl.observability.run_log import read_run
from megatron_rl.reporting.formatting import format_duration, format_value, visible

_KEPT_ROWS = 400
"""Rows behind the curves: a view costs the same at step 100 and at step 100,000."""
_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 40
_LOG_LINES = 6
_SILENT_SECONDS = 90.0
"""A rank writes its file every 30 seconds at least."""
_STYLES = {"running": "cyan", "finished": "green", "broken": "bold red"}


class RunView:
    """Follows one run folder; `draw` reads what came since the last call."""

    def __init__(self, folder: Path) -> None:
        """Raise UserError("RUN_DIR") for a folder that holds no run."""
        self._folder, self._offset = folder, 0
        self._rows: deque[dict[str, MetricValue]] = deque(maxlen=_KEPT_ROWS)
        self.run = read_run(folder)

    @property
    def running(self) -> bool:
        return bool(self.run["status"] == "running")

    def draw(self) -> RenderableType:
        """Read on, and return the view."""
        self.run = read_run(self._folder)
        self._read_rows()
        parts = [self._draw_head(), self._draw_progress(), self._draw_ranks(), self._draw_metrics(), self._draw_log()]
        return Group(*(part for part in parts if part is not None))

    def _read_rows(self) -> None:
        """Read whole lines that came; all again where a resumed run has cut the file."""
        path = self._folder / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            if path.stat().st_size < self._offset:
                self._offset = 0
                self._rows.clear()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(ValueError):
                    self._rows.append(json.loads(line))

    def _draw_head(self) -> Text:
        run, status = self.run, self.run["status"]
        text = Text.assemble((self._folder.resolve().name, "bold"), "  ", (status, _STYLES[status]), f"  on {run.get('host')}")
        if self._rows:
            verdict, good = proof_verdict(self._rows[-1])
            text.append(f"  {verdict}", "green" if good else "bold red")
        if run.get("reason"):
            text.append(f"\n{visible(run['reason'])}", "red")
        return text

    def _draw_progress(self) -> Table:
        planned = int((self.run.get("config") or {}).get("train", {}).get("steps") or 0)
        done = int(self._rows[-1]["step"] or 0) if self._rows else 0
        seconds = [float(value) for row in list(self._rows)[-20:] if (value := row.get("time/step"))]
        words = f"step {done} of {planned or '?'}"
        if self.run.get("started"):
            ended = datetime.fromisoformat(self.run["ended"]).timestamp() if self.run.get("ended") else time.time()
            words += f", {format_duration(ended - datetime.fromisoformat(self.run['started']).timestamp())}"
        if seconds:
            words += f", {format_value(median(seconds), 'seconds')} a step"
            words += f", about {format_duration(median(seconds) * (planned - done))} left" if self.running and planned > done else ""
        table = Table.grid(padding=(0, 2))
        table.add_row(ProgressBar(total=planned or None, completed=done, width=_CURVE), words)
        return table

    def _draw_ranks(self) -> Text | None:
        """Tell where the ranks are, by the newest file's time: clocks of machines differ."""
        numbers = sorted(int(path.stem.removeprefix("rank_")) for path in (self._folder / "ranks").glob("rank_*.json"))
        statuses = [status for number in numbers if (status := read_rank_status(self._folder / "ranks", number))]
        if not statuses or not self.running:
            return None
        newest = max(status.last_seen for status in statuses)
        text = Text(describe_ranks(statuses, newest, _is_silent))
        if (age := time.time() - newest) > _SILENT_SECONDS:
            text.append(f"\nno rank was heard for {format_duration(age)}: the run is held, or ended without a word", "bold red")
        return text

    def _draw_metrics(self) -> Table | None:
        """Tell what the run's progress line tells, and its seconds and memory, as the declarations of the run say."""
        declared = read_declarations(self.run)
        names = dict.fromkeys(name for row in self._rows for name in row)
        shown = [metric for name in names if (metric := describe(name, declared)) and (metric.progress or name == "time/step")]
        if not shown:
            return None
        table = Table(box=None, pad_edge=False, header_style="dim")
        for head, side in (("metric", "left"), ("first", "right"), ("last", "right"), ("", "left"), ("what it is", "left")):
            table.add_column(head, justify=side, no_wrap=head != "what it is")  # type: ignore[arg-type]
        for metric in shown:
            values = [row[metric.name] for row in self._rows if metric.name in row]
            cells = (format_value(values[0], metric.unit), format_value(values[-1], metric.unit), draw_curve(values))
            table.add_row(metric.name, *cells, Text(metric.meaning, "dim"))
        return table

    def _draw_log(self) -> Text | None:
        path = self._folder / "run.log"
        if not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return Text(visible("\n".join(lines[-_LOG_LINES:])), "dim", no_wrap=True, overflow="ellipsis")


def watch_run(folder: Path, every: float, once: bool) -> None:
    """Show the run until it ends or Ctrl-C is pressed; with `once` print one view. Raise UserError("RUN_DIR") where there is no run."""
    view, console = RunView(folder), Console(highlight=False)
    if once:
        console.print(view.draw())
        return
    with suppress(KeyboardInterrupt), Live(view.draw(), console=console, auto_refresh=False) as live:
        while view.running:
            time.sleep(every)
            live.update(view.draw(), refresh=True)


def draw_curve(values: list[Any]) -> str:
    """Return values as bars from the lowest to the highest, the newest at the right: means of neighbours where there are many; a gap for
    what is not finite (None)."""
    per_bar = -(-len(values) // _CURVE) or 1
    groups = [[value for value in values[i : i + per_bar] if value is not None] for i in range(0, len(values), per_bar)]
    means = [sum(group) / len(group) if group else None for group in groups]
    finite = [mean for mean in means if mean is not None]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    return "".join(" " if mean is None else _BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def _is_silent(status: RankStatus, now: float) -> bool:
    return now - status.last_seen > _SILENT_SECONDS
