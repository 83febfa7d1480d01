"""A user's own transport that misbehaves in a sync with a live engine: one line that names it, on whichever side it happens."""

import os

import pytest
from support import fake_engine
from support.misbehaving import VARIABLE
from support.processes import World

from megatron_rl.errors import RunError

NAME = "support.misbehaving_transport:TRANSPORT"


def misbehave(misdeed):
    """Set what the trainer's side does from now on."""
    os.environ[VARIABLE] = misdeed


@pytest.mark.long
def test_an_engine_names_the_transport_that_fails_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "receive raises")  # engines inherit it
    with World(1, tmp_path / "world") as world, pytest.raises(RunError) as caught:
        world.call(fake_engine.start, tmp_path, 1, {"transport": NAME, "timeout": 20.0, "delta": "off"}, 30.0, seconds=900.0)
    assert f"sync.transport = '{NAME}': fails (ValueError: two lines" in str(caught.value)


@pytest.mark.long
def test_a_trainer_rank_names_the_transport_that_fails_in_it(tmp_path):
    with World(2, tmp_path / "world") as world:
        world.call(fake_engine.start, tmp_path, 1, {"transport": NAME, "timeout": 20.0, "delta": "off"}, 30.0, seconds=900.0)
        world.call(misbehave, "send raises")
        with pytest.raises(RunError, match="the sync broke: trainer rank [01]: ") as caught:
            world.call(fake_engine.sync_through, 2, {})
    assert f"sync.transport = '{NAME}': fails (ValueError: two lines" in str(caught.value)
