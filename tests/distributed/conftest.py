"""Worlds of one, two and four ranks, and one that never sees Megatron; each starts once and is ended by pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import make_checkpoint
from support.processes import World


def _world(size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(size, tmp_path_factory.mktemp(f"world{size}")) as world:
        yield world


@pytest.fixture(scope="session")
def one(tmp_path_factory) -> Iterator[World]:
    yield from _world(1, tmp_path_factory)


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> Iterator[World]:
    yield from _world(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four(tmp_path_factory) -> Iterator[World]:
    yield from _world(4, tmp_path_factory)


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Iterator[World]:
    """A process for transformers, which gives wrong numbers beside Megatron's CPU patches."""
    yield from _world(1, tmp_path_factory)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
