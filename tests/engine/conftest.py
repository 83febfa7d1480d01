"""Checkpoints of the engine tests, and worlds of one process that may hold an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.models import make_checkpoint
from support.processes import World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def new_world(tmp_path_factory) -> Iterator[Callable[[], World]]:
    """Makes worlds of one process each; all are ended, with their engines, after the module."""
    with ExitStack() as worlds:
        yield lambda: worlds.enter_context(World(1, tmp_path_factory.mktemp("world")))
