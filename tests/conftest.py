"""Shared by all tests: a temporary folder that is removed at the end, worlds of ranks, the skip of GPU tests without a GPU, and a line with
the reasons of all skips."""

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import pytest

gc.disable()  # imports and the collection of thousands of tests make a million objects that stay, see `pytest_collection_finish`

from support import kernel_sources  # noqa: E402
from support.processes import WorldPool  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-kernels", action="store_true", help="with -m kernels tests/unit: record sources that pass")


def pytest_configure(config: pytest.Config) -> None:
    """Give this session and all its processes a temporary folder of their own; xdist's workers inherit it. Its name is short because
    the path of a Unix socket has at most 107 bytes."""
    if hasattr(config, "workerinput"):
        return
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="mrl-")
    Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-1000)  # after multiprocessing removed its own files there


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldPool]:
    """`worlds(size)` returns a world of gloo ranks, the same one for all tests of a module. Each module begins with fresh ranks, which
    are forked in milliseconds from a server that lives as long as the session."""
    with WorldPool(tmp_path_factory.mktemp("worlds")) as pool:
        yield pool


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and all files of an `xdist_group`, such as those that share an engine, to the same."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            _, _, group = nodeid.rpartition("]")[2].rpartition("@")  # xdist puts it behind the name
            return group if nodeid.endswith(f"@{group}") else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before items are selected by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = Counter[str]()
    for item in items:
        seen[name := item.nodeid.partition("[")[0]] += not item.get_closest_marker("long")
        few = item.get_closest_marker("default_cases")
        if (few and seen[name] > few.args[0]) or (item.get_closest_marker("kernels") and kernel_sources.have_passed()):
            item.add_marker(pytest.mark.long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    whole = config.option.markexpr == "kernels" and not config.option.keyword and config.args == ["tests/unit"]
    if config.option.record_kernels and whole and not exitstatus and not hasattr(config, "workerinput"):
        kernel_sources.record()


def pytest_collection_finish() -> None:
    """Leave out of all later garbage collections what lives as long as the session."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after all other summaries, before pytest's closing line
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    result = yield
    reasons = Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.write_line("skipped: " + ", ".join(f"{count} ({reason})" for reason, count in reasons.most_common()))
    return result
