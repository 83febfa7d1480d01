"""Two real engines have the completions of one, and losses change no bit. For fake engines see tests/distributed/test_engine_faults.py."""

import pytest
from support import trainer_engine
from support.models import FP8, TENSORS, random_sequences
from support.processes import alive_after, but_trackers, family

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(16, seed=41)]
HEALTH = 60.0


@pytest.fixture(scope="module")
def world(new_world, checkpoint, tmp_path_factory):
    """A trainer and two engines. The tests of this module share them in order; each leaves them proved."""
    world, sections = new_world(), {"rollout": {"engines": 2, "health_timeout": HEALTH}}
    world.call(trainer_engine.start, checkpoint, tmp_path_factory.mktemp("several"), FP8, sections)
    world.call(trainer_engine.check_live)
    world.call(trainer_engine.compare_graphs)
    return world


def generate(world, tokens=24, engine=None):
    return world.call(trainer_engine.generate_seeded, PROMPTS, tokens, engine)[0]


def assert_alike(world, version):
    both, first, second = (generate(world, engine=engine) for engine in (None, 0, 1))
    assert both == first == second and {served for *_, served in both} == {version}
    assert sum(len(tokens) for tokens, *_ in both) > 200


def test_two_engines_give_the_bits_of_one_before_and_after_a_sync(world):
    assert_alike(world, 0)
    world.call(trainer_engine.train, random_sequences(8, seed=42))
    report = world.call(trainer_engine.sync, 1, 64 << 10)[0]
    assert (report["proved"], report["tensors"], report["restarts"]) == (2 * TENSORS, 2 * TENSORS, 0)
    assert_alike(world, 1)


def test_engines_that_are_lost_in_a_sync_are_replaced_and_the_sync_is_proved(world):
    """One engine hangs, the other is killed."""
    world.call(trainer_engine.train, random_sequences(8, seed=43))
    report = world.call(trainer_engine.sync_with_faults, {0: "hang", 1: "kill"}, 2, {"canary": 2})[0]
    assert (report["proved"], report["tensors"], report["restarts"]) == (2 * TENSORS, 2 * TENSORS, 2)
    assert report["canary"] == 0.0
    assert report["recovery_seconds"] > 1
    lines = world.call(trainer_engine.take_messages)[0]
    assert any(line.startswith("engine 1 is lost: ") and "its process ended with exit code -9" in line for line in lines), lines
    silent = f"it did not respond for {HEALTH:g} s (rollout.health_timeout)"
    assert any("engine 0 is lost: " in line and silent in line for line in lines), lines
    assert any("engines serve policy version 2 again, proved" in line for line in lines), lines
    assert_alike(world, 2)


def test_the_other_engine_takes_over_from_one_whose_connection_breaks_and_all_end_with_the_trainer(world):
    """This is the last test, because nothing is left after it: the trainer is killed while its engines hang, one of them just starting."""
    expected = generate(world, 100)
    results = world.call(trainer_engine.generate_with_faults, {0: "cut requests"}, 2, PROMPTS, 100)[0]
    assert results["result"] == expected
    lines = world.call(trainer_engine.take_messages)[0]
    assert any("engine 0 is lost: " in line and "still runs" in line for line in lines), lines
    trainer, *engines = family(world.pid())
    for process in but_trackers(engines):
        process.suspend()
    trainer.kill()
    assert len(engines) >= 4 and alive_after(engines, 120) == []
