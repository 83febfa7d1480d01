"""Real engines, each started once by a worker and handed out to all tests that ask for the same launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import trainer_engine
from support.models import FP8, make_checkpoint
from support.processes import World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def new_world(tmp_path_factory) -> Iterator[Callable[[], World]]:
    """Makes worlds of one process each; all are ended, with their engines, after the module."""
    with ExitStack() as worlds:
        yield lambda: worlds.enter_context(World(1, tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="session")
def launched(tmp_path_factory) -> Iterator[Callable[..., World]]:
    """Starts a trainer and its engines, `launched(checkpoint, precision, sections)`, or gives those of an earlier test, synced again
    as policy version 0. Nobody ends what it was given: others may ask for it."""
    worlds: dict[str, World] = {}

    def launch(checkpoint: Path, precision: dict[str, Any], sections: dict[str, Any] | None = None) -> World:
        key = repr((checkpoint, precision, sections))
        if key in worlds and worlds[key].is_alive():
            worlds[key].call(trainer_engine.sync, 0)
        else:
            world = worlds[key] = stack.enter_context(World(1, tmp_path_factory.mktemp("world")))
            world.call(trainer_engine.break_transformer_engine, tmp_path_factory.mktemp("broken"))
            world.call(trainer_engine.start, checkpoint, tmp_path_factory.mktemp("engine"), precision, sections)
        return worlds[key]

    with ExitStack() as stack:
        yield launch


@pytest.fixture(scope="module")
def unified(launched, checkpoint) -> World:
    """A trainer and its engine in unified FP8, one layer. Tests leave them proved."""
    return launched(checkpoint, FP8)
