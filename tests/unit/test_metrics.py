"""Metrics: every emitted metric is declared, every declaration is emitted, and readers use only declared names."""

import ast
import functools
import re
import warnings
from collections import defaultdict
from pathlib import Path

import pytest

import megatron_rl.batch.replay
import megatron_rl.training.loop  # noqa: F401  together, these import all modules that declare metrics
from megatron_rl import metrics
from megatron_rl.metrics import DECLARED, Metric, UndeclaredMetricWarning, declare, describe, group_by_panel, warn_undeclared
from megatron_rl.reporting.plots import SECTIONS

ROOT = Path(__file__).parents[2]
SOURCES = {file: ast.parse(file.read_text()) for file in sorted((ROOT / "megatron_rl").rglob("*.py"))}
READERS = [*(ROOT / "megatron_rl/reporting").glob("*.py"), ROOT / "megatron_rl/observability/console.py", *(ROOT / "tools").rglob("*.py")]
METRIC = re.compile(r"[a-z_]+(/[a-z_{}]+)+")


def is_declare(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "declare"


def names_in(nodes: list[ast.expr]) -> set[ast.Name]:
    return {name for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def find_declarations(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the constants of a module that contain names of metrics, and the names."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and any(map(is_declare, ast.walk(node)))]
    declared = {call.args[0].value for node in assigned for call in ast.walk(node) if is_declare(call)}
    return {name.id for node in assigned for name in names_in(node.targets)}, declared


def own_declarations() -> dict[str, Metric]:
    """Return the declarations of the package, without those of tests and examples."""
    return {name: DECLARED[name] for tree in SOURCES.values() for name in find_declarations(tree)[1]}


@functools.cache
def find_emissions(file: Path) -> set[str]:
    """Return the names that a file uses for anything but reading, as in `row[NAME]` and `row.get(NAME)`."""
    read: list[ast.expr] = []
    for node in ast.walk(SOURCES[file]):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            read.append(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            read += node.args
    used = {node for node in ast.walk(SOURCES[file]) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {name.id for name in used - names_in(read)}


@functools.cache
def find_imports() -> dict[tuple[str, str], list[Path]]:
    """Return the files that import each (module, name)."""
    imports = defaultdict(list)
    for file, tree in SOURCES.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
            for alias in node.names:
                imports[str(node.module), alias.name].append(file)
    return imports


def keys_written(tree: ast.Module) -> list[str]:
    """Return the literal keys of dicts and assignments, with `{}` for the variable parts of an f-string."""
    keys: list[ast.expr | None] = []
    for node in ast.walk(tree):
        keys += node.keys if isinstance(node, ast.Dict) else [node.key] if isinstance(node, ast.DictComp) else []
        keys += [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else []
    parts = [key.values if isinstance(key, ast.JoinedStr) else [key] for key in keys]
    return ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in part_list) for part_list in parts]


def test_every_declaration_is_emitted_and_names_are_only_written_in_declarations():
    for file, tree in SOURCES.items():
        constants, names = find_declarations(tree)
        assert len(names) == sum(map(is_declare, ast.walk(tree))), f"{file}: call `declare` at top level, for a constant"
        assert names <= DECLARED.keys(), f"{file} is not imported by this test"
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        never = {name for name in constants if not any(name in find_emissions(user) for user in (file, *find_imports()[module, name]))}
        assert not never, f"{file} declares {never}, but nothing emits it"
    for file, tree in SOURCES.items():
        literal = [key for key in keys_written(tree) if METRIC.fullmatch(key)]
        assert not literal, f"{file} emits {literal}, use a constant from `metrics.declare`"


@pytest.mark.parametrize("file", READERS, ids=lambda file: str(file.relative_to(ROOT)))
def test_readers_use_only_declared_names(file):
    kinds = {name.partition("/")[0] for name in DECLARED}
    words = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    unknown = [word for word in words if METRIC.fullmatch(word) and word.partition("/")[0] in kinds and not describe(word)]
    assert not unknown, f"{file} reads {unknown}, which are not declared"


def test_the_report_has_every_panel_and_the_longest_family_describes_its_members():
    panels = [panel.ylabel for plots in SECTIONS.values() for plot in plots for panel in plot.panels]
    assert sorted(panels) == sorted(group_by_panel(own_declarations()))
    load = describe("memory/engine_train_mb")
    assert (load.name, load.label, load.unit) == ("memory/engine_train_mb", "train", "MiB") and "“train”" in load.meaning
    assert describe("memory/train_mb").panels == ("trainer (MiB)",)
    assert describe("accuracy/source_a/b.c").meaning == "share of correct completions, set a/b.c"
    assert describe("accuracy/level_") is describe("memory/train_gb") is describe("test/nothing") is None


def test_invalid_declarations_are_refused(monkeypatch):
    monkeypatch.setattr(metrics, "DECLARED", {})
    assert declare("test/mine", "what it means") == "test/mine"
    for name, unit in (("test/mine", "number"), ("step", "number"), ("test/other", "parsec"), ("test/{}/{}", "number")):
        with pytest.raises(ValueError, match=f"metric {re.escape(name)} in {unit}"):
            declare(name, "what it means", unit)


def test_each_undeclared_name_is_warned_of_once(recwarn):
    warnings.simplefilter("default")
    for _ in range(2):
        warn_undeclared(["step", "unix_time", "reward/mean", "test/a", "test/b"])
    assert [warning.category for warning in recwarn] == [UndeclaredMetricWarning] * 2
    assert "test/a" in str(recwarn[0].message)
