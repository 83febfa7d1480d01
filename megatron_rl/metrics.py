"""Metrics, each declared beside the code that makes it: name, meaning, unit, and where it is shown.

    KL = declare("loss/kl", "KL term against the reference model", "nats", "KL term", label="KL")
    LEVEL = declare("accuracy/level_{}", "share of correct completions, level {}", "share")
    row = {KL: 0.01, LEVEL.format(3): 0.5}

`{}` stands for a part that only a run knows. A run writes its declarations into run.json; the report reads them there, without an import
of the code that makes metrics. The progress line and TensorBoard read them here. Nothing else lists metrics.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from megatron_rl.errors import UserError

Unit = Literal["number", "small", "share", "count", "index", "bytes", "MiB", "seconds", "nats"]
"""`small`: a number often near 0. `share`: 0.5 is 50 %. `index`: a count that rows hold as an integer."""
MetricValue = float | int | None
"""None: not finite."""
STEP_SECONDS = "seconds of a step"
"""The panel of the parts of a step, which do not overlap."""
ROW_KEYS = ("step", "unix_time")
"""What else a row holds: its step, and the second when it was written."""


class UndeclaredMetricWarning(UserWarning):
    """A row holds a metric that nobody declared. Shown once for each name."""


@dataclass(frozen=True)
class Metric:
    """One declaration, or (see `describe`) what it says of one name of its family."""

    name: str
    meaning: str
    unit: Unit = "number"
    panels: tuple[str, ...] = ()
    """Axes of the report that draw it, by their labels: within the package those of `reporting.plots.SECTIONS`; another label, of your own
    code, gets a plot of its own."""
    label: str = ""
    """Its name there; "" for the last part of its name."""
    progress: str = ""
    """What the progress line says of it, a format of the value and rich's markup; "" for nothing."""
    expected: tuple[float, float] | None = None
    """The range outside of which the run's log warns."""
    causes: tuple[str, str] = ("", "")
    """What makes it fall below `expected`, and what makes it rise above, for that warning."""

    @property
    def pattern(self) -> str:
        """A regular expression that its names match, and nothing else; group 1 is the part that `{}` stands for."""
        return re.escape(self.name).replace(r"\{\}", "(.+)")


Declarations = Mapping[str, Metric]
DECLARED: dict[str, Metric] = {}
"""What the modules imported so far declare, by name."""


def declare(
    name: str,
    meaning: str,
    unit: Unit = "number",
    *panels: str,
    label: str = "",
    progress: str = "",
    expected: tuple[float, float] | None = None,
    causes: tuple[str, str] = ("", ""),
) -> str:
    """Declare a metric, or a family with one `{}`, and return its name. Raise ValueError for one that is declared or has no such unit."""
    if name in DECLARED or name in ROW_KEYS or unit not in get_args(Unit) or name.count("{}") > 1:
        raise ValueError(f"metric {name} in {unit}: it is declared already, or has several {{}}, or there is no such unit")
    DECLARED[name] = Metric(name, meaning, unit, panels, label or name.rpartition("/")[2], progress, expected, causes)
    return name


def describe(name: str, declared: Declarations = DECLARED) -> Metric | None:
    """Return what is declared of a metric: by itself, or by the longest family that it belongs to. None where nothing is."""
    if name in declared:
        return declared[name]
    families = [(metric, match[1]) for metric in declared.values() if "{}" in metric.name and (match := re.fullmatch(metric.pattern, name))]
    if not families:
        return None
    family, part = max(families, key=lambda found: len(found[0].name))
    return replace(family, name=name, meaning=family.meaning.replace("{}", part), label=family.label.replace("{}", part))


def warn_undeclared(names: Iterable[str]) -> None:
    """Show one UndeclaredMetricWarning for each of a row's names that nobody declared."""
    for name in names:
        if name not in ROW_KEYS and describe(name) is None:
            warnings.warn(f"metric {name} is not declared; see megatron_rl.metrics.declare", UndeclaredMetricWarning, stacklevel=2)


def find_unexpected(row: Mapping[str, MetricValue]) -> dict[str, str]:
    """Return, for each metric of a row that is outside its `expected` range, a sentence with the likely causes."""
    found = {}
    for name, value in row.items():
        metric = describe(name)
        if value is not None and metric and metric.expected and not metric.expected[0] <= value <= metric.expected[1]:
            low, high = metric.expected
            found[name] = f"{name} is {value:.3g}, expected {low:g} to {high:g} ({metric.meaning}); likely: {metric.causes[value > high]}"
    return found


def group_by_panel(declared: Declarations = DECLARED) -> dict[str, list[Metric]]:
    """Return the declarations of each panel."""
    panels = dict.fromkeys(panel for metric in declared.values() for panel in metric.panels)
    return {panel: [metric for metric in declared.values() if panel in metric.panels] for panel in panels}


def dump_declarations() -> list[dict[str, Any]]:
    """Return `DECLARED` as run.json holds it."""
    return [asdict(metric) for metric in DECLARED.values()]


def read_declarations(run: Mapping[str, Any]) -> Declarations:
    """Return the declarations in a run's run.json, {} where it holds none. Raise UserError("RUN_DIR") for those of another version."""
    try:
        return {metric["name"]: Metric(**_to_tuples(metric)) for metric in run.get("metrics", [])}
    except (TypeError, KeyError) as error:
        rule = f"holds declarations of metrics from another version ({error})"
        raise UserError("RUN_DIR", "run.json", rule, "use the version that wrote it") from None


def _to_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
