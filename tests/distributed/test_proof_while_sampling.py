"""The engine samples while its new weights are proved, but answers only after the proof. No token of unproved weights is returned."""

import pytest
from support import fake_engine
from support.processes import World

from megatron_rl.errors import RunError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("light")
    with World(1, folder / "world") as world:
        world.call(fake_engine.start, folder, 2, {"transport": "shared_memory"}, 10.0, seconds=900.0)
        yield world


def test_requests_run_during_the_proof_and_are_answered_after_it(world):
    world.call(fake_engine.change, 2)
    done_before, answers = world.call(fake_engine.sample_during_proof, 2)[0]
    assert not done_before, "an answer left before the weights were proved"
    assert answers == world.call(fake_engine.answers, 4, 5)[0] and {version for _, version in answers} == {2}


def test_a_wrong_byte_is_named_and_what_was_sampled_with_it_is_dropped(world):
    world.call(fake_engine.change, 3)
    line = r"^the sync is not proved: .* of engine rank 0 differs from .*; first in rows 0\.\.127, columns 0\.\.127"
    with pytest.raises(RunError, match=line):
        world.call(fake_engine.sample_during_proof, 3, True)
    assert world.call(fake_engine.take_answers)[0] == [], "the engine still holds them back"
    world.call(fake_engine.sync_through, 4, {})
    answers = world.call(fake_engine.take_answers)[0]
    assert answers == world.call(fake_engine.answers, 4, 5)[0] and {version for _, version in answers} == {4}, "sampled anew"
