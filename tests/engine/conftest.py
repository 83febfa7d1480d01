"""Real engines, each started once by a worker and shared by all tests that ask for the same launch."""

from contextlib import ExitStack

import pytest
from support import trainer_engine
from support.models import FP8, make_checkpoint
from support.processes import World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def new_world(tmp_path_factory):
    """`new_world()`: a new world of one process. All end, with their engines, after the module."""
    with ExitStack() as worlds:
        yield lambda: worlds.enter_context(World(1, tmp_path_factory.mktemp("world")))


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """`launched(checkpoint, precision, sections)`: a trainer and its engines, started or shared with earlier tests and then synced again
    as policy version 0. Tests must not end them."""
    worlds = {}

    def launch(checkpoint, precision, sections=None):
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
def unified(launched, checkpoint):
    """A trainer and its engine in unified FP8, with one layer. Tests leave them proved."""
    return launched(checkpoint, FP8)
