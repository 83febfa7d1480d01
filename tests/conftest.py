"""Shared by all tests: a temporary folder that is removed at the end, worlds of ranks, and the skip of GPU tests without a GPU."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

import pytest
from support.processes import WorldPool


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
