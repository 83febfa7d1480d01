"""Real engines, each started once by a worker and shared by all tests that ask for the same launch."""

from contextlib import ExitStack

import pytest
from support import trainer_engine
from support.debian import NoPackageError
from support.models import FP8, make_checkpoint
from support.node_runs import run_on_one_node
from support.nodes import Cluster
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


@pytest.fixture
def cluster(tmp_path):
    """`cluster(count)` starts nodes that end with the test."""
    with ExitStack() as clusters:

        def start(count, **options):
            try:
                return clusters.enter_context(Cluster(count, tmp_path, **options))
            except (OSError, NoPackageError) as error:
                pytest.skip(str(error))

        yield start


@pytest.fixture(scope="session")
def on_one_node(tmp_path_factory):
    """The folder of the run of `node_runs.COMMON` on this machine."""
    return run_on_one_node(tmp_path_factory.mktemp("one"), {})
