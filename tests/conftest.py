"""Shared by all tests: worlds of ranks; tests marked `gpu` skip themselves where torch sees no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.processes import WorldPool


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldPool]:
    """`worlds(size)`: gloo ranks, the same ones for all tests of a module. Ranks are forked in milliseconds from a server that lives as
    long as the session, so each module begins with fresh ones."""
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
