"""Metrics, declared next to the code that emits them: name, meaning, unit, and where they are shown.

    KL = declare("loss/kl", "KL term against the reference model", "nats", "KL term", label="KL")
    LEVEL = declare("accuracy/level_{}", "share of correct completions, level {}", "share")
    row = {KL: 0.01, LEVEL.format(3): 0.5}

`{}` stands for a part of the name that is known only at run time. A run writes its declarations to run.json, from which the report reads
them without importing the code that emits metrics.
"""

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

Unit = Literal["number", "small", "share", "count", "index", "bytes", "MiB", "seconds", "nats"]
"""`small`: a number that is often near 0. `share`: 0.5 means 50 %. `index`: an integer count."""
MetricValue = float | int | None  # None if not finite
STEP_SECONDS = "seconds of a step"  # panel of the parts of a step, which do not overlap
ROW_KEYS = ("step", "unix_time")  # keys of a row that are not metrics


class UndeclaredMetricWarning(UserWarning):
    """Issued once for each undeclared metric in a row."""


@dataclass(frozen=True)
class Metric:
    """A declared metric, a family of metrics, or a member of a family (see `describe`)."""

    name: str
    meaning: str
    unit: Unit = "number"
    panels: tuple[str, ...] = ()
    """Labels of the report's axes that show the metric, from `reporting.plots.SECTIONS`. Other labels get a plot of their own."""
    label: str = ""  # name in the report
    progress: str = ""  # format of the value in the progress line, with rich markup; "" omits it
    expected: tuple[float, float] | None = None  # range outside of which the run logs a warning
    causes: tuple[str, str] = ("", "")  # likely causes of values below and above `expected`

    @property
    def pattern(self) -> str:
        """Regular expression that matches exactly the names of the family. Group 1 is the part that `{}` stands for."""
        return re.escape(self.name).replace(r"\{\}", "(.+)")


Declarations = Mapping[str, Metric]
DECLARED: dict[str, Metric] = {}  # declarations of all imported modules by name


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
    """Declare a metric, or a family whose name contains one `{}`, and return its name. `label` defaults to the last part of the name.

    Raise ValueError if the name is already declared or invalid, or the unit is unknown.
    """
    if name in DECLARED or name in ROW_KEYS or unit not in get_args(Unit) or name.count("{}") > 1:
        raise ValueError(f"metric {name} in {unit}: the name is already declared or has more than one {{}}, or the unit is unknown")
    DECLARED[name] = Metric(name, meaning, unit, panels, label or name.rpartition("/")[2], progress, expected, causes)
    return name


def describe(name: str, declared: Declarations = DECLARED) -> Metric | None:
    """Return the declaration of a metric, or of the longest family that it belongs to, or None if it is not declared."""
    if name in declared:
        return declared[name]
    families = [(metric, match[1]) for metric in declared.values() if "{}" in metric.name and (match := re.fullmatch(metric.pattern, name))]
    if not families:
        return None
    family, part = max(families, key=lambda found: len(found[0].name))
    return replace(family, name=name, meaning=family.meaning.replace("{}", part), label=family.label.replace("{}", part))


def warn_undeclared(names: Iterable[str]) -> None:
    """Issue an UndeclaredMetricWarning for each undeclared name."""
    for name in names:
        if name not in ROW_KEYS and describe(name) is None:
            warnings.warn(f"metric {name} is not declared; see megatron_rl.metrics.declare", UndeclaredMetricWarning, stacklevel=2)


def find_unexpected(row: Mapping[str, MetricValue]) -> dict[str, str]:
    """Return a warning with the likely causes for each metric of a row that is outside its `expected` range."""
    found = {}
    for name, value in row.items():
        metric = describe(name)
        if value is not None and metric and metric.expected and not metric.expected[0] <= value <= metric.expected[1]:
            low, high = metric.expected
            found[name] = f"{name} is {value:.3g}, expected {low:g} to {high:g} ({metric.meaning}); likely: {metric.causes[value > high]}"
    return found


def group_by_panel(declared: Declarations = DECLARED) -> dict[str, list[Metric]]:
    """Return the metrics of each panel."""
    panels = dict.fromkeys(panel for metric in declared.values() for panel in metric.panels)
    return {panel: [metric for metric in declared.values() if panel in metric.panels] for panel in panels}


def dump_declarations() -> list[dict[str, Any]]:
    """Return `DECLARED` in the format of run.json."""
    return [asdict(metric) for metric in DECLARED.values()]


def read_declarations(run: Mapping[str, Any]) -> Declarations:
    """Return the declarations in the contents of run.json, as `observability.run_folder` returns them. Fields that only another version
    has are ignored."""
    known = {field.name for field in fields(Metric)}
    rows: Iterable[dict[str, Any]] = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()} for row in run.get("metrics", ())
    )
    return {row["name"]: Metric(**{key: value for key, value in row.items() if key in known}) for row in rows}
