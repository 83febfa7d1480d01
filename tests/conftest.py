"""Shared by all tests: those marked `gpu` skip themselves where torch sees no GPU; and who may run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

_ONE_AFTER_THE_OTHER = ("engine", "distributed")
"""Folders whose tests share engines and worlds of processes: each stays on one of the two workers."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(pytest.mark.xdist_group(folder if folder in _ONE_AFTER_THE_OTHER else item.path.stem))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
