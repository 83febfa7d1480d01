"""Checkpoints that many modules start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import make_checkpoint
from support.processes import World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def one(worlds):
    return worlds(1)


@pytest.fixture(scope="module")
def two(worlds):
    return worlds(2)


@pytest.fixture(scope="module")
def four(worlds):
    return worlds(4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A process for transformers, which gives wrong numbers beside Megatron's CPU patches."""
    with World(1, tmp_path_factory.mktemp("plain")) as world:
        yield world
