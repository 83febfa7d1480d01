"""Checkpoints that many modules use."""

import json

import pytest
from support.families import ARCHITECTURES
from support.models import make_checkpoint, make_model
from support.processes import World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tied"), num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """`model_folder(name, **changes)`: a random checkpoint of an architecture, written once. `changes` overwrite fields of config.json."""
    folders = {}

    def get(name, **changes):
        key = json.dumps([name, changes])
        if key not in folders:
            folders[key] = make_model(tmp_path_factory.mktemp(name), ARCHITECTURES[name] | changes)
        return folders[key]

    return get


@pytest.fixture(scope="module")
def transformers_process(tmp_path_factory):
    """A process for transformers, which computes wrong numbers if Megatron's CPU patches are loaded."""
    with World(1, tmp_path_factory.mktemp("transformers")) as world:
        yield world


@pytest.fixture(scope="module")
def alone(worlds):
    """`alone(run, ...)`: what a function returns on one process, computed once. Lists, which are batches, are not looked at."""
    results = {}

    def get(run, *args):
        key = run.__name__, *(str(arg) for arg in args if not isinstance(arg, list))
        if key not in results:
            results[key] = worlds(1).call(run, *args)[0]
        return results[key]

    return get
