"""Shared by all tests: a temporary folder that is removed at the end, worlds of ranks, the skip of GPU tests without a GPU, and a line with
the reasons of all skips."""

import gc
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # imports and the collection of thousands of tests make a million objects that stay, see `pytest_collection_finish`

from support.processes import WorldPool  # noqa: E402

DEFAULT_CASES = {
    "test_training_equals_that_of_one_process": 8, "test_every_layout_learns_what_one_process_does_and_has_its_bits": 6,
    "test_training_in_a_layout_equals_that_of_one_process": 4, "test_packed_equals_alone": 4, "test_the_policy_does_not_notice": 1,
    "test_what_was_added_stays_zero_in_training": 2, "test_no_layer_counts_and_no_bit_changes": 1,
    "test_every_layout_trains_the_same_layers": 2, "test_a_run_of_several_ranks_goes_on_bit_for_bit_and_any_layout_loads_it": 1,
    "test_what_is_loaded_is_the_checkpoint": 16, "test_what_is_loaded_is_the_fp8_checkpoint": 2,
    "test_values_that_were_loaded_under_another_name_are_named": 11, "test_no_patch_is_needless": 1,
    "test_recomputed_layers_have_the_same_gradient": 1, "test_layers_that_are_recomputed_learn_the_same": 1,
}  # fmt: skip
"""How many of a slow test's cases the default tests run, the first ones. The long tests run all."""

SHARE_AN_ENGINE = ("test_remote_columns", "test_same_bytes", "test_sampling", "test_switches")  # the fixture `unified`


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
    """Give each file to one worker, and all files that share an engine to the same."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "unified" if Path(file).stem in SHARE_AN_ENGINE else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before items are selected by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = Counter[str]()
    for item in items:
        seen[name := item.nodeid.partition("[")[0]] += not item.get_closest_marker("long")
        if seen[name] > DEFAULT_CASES.get(item.originalname, len(items)):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


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
