"""Checkpoints that many modules use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.families import ARCHITECTURES
from support.models import make_checkpoint, make_model
from support.processes import World


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def tied_checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Callable[..., Path]:
    """`model_folder(name, **changes)`: a random checkpoint of an architecture, written once. `changes` overwrite fields of config.json."""
    folders: dict[str, Path] = {}

    def get(name: str, **changes: Any) -> Path:
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
