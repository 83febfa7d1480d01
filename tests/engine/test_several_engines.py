"""Two real engines behind one face: the same completions as one gives, both proved at every sync, and losses that change no bit.

More losses, of lighter engines: tests/distributed/test_engine_faults.py.
"""

from __future__ import annotations

import pytest
from support.models import FP8, TENSORS, random_sequences
from support.processes import alive_after, but_trackers, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # two engines start twice

PROMPTS = [sequence.prompt_ids for sequence in random_sequences(16, seed=41)]
HEALTH = 30.0
START = 520.0


@pytest.fixture(scope="module")
def served(new_world, checkpoint, tmp_path_factory):
    """A trainer and two engines. The tests of this module share them in order; each leaves them proved."""
    world = new_world()
    world.call("support.trainer_engines:start", checkpoint, tmp_path_factory.mktemp("several"), FP8, 2, HEALTH, seconds=START)
    return world


def generate(world, tokens: int = 24, alone: int | None = None):
    return world.call("support.trainer_engines:generate", PROMPTS, tokens, alone)[0]


def assert_synced(report, restarts: int = 0) -> None:
    assert (report["proved"], report["tensors"], report["restarts"]) == (2 * TENSORS, 2 * TENSORS, restarts)


def test_nobody_without_the_key_is_answered_and_nothing_listens_on_other_interfaces(served):
    answers = served.call("support.trainer_engines:without_key")[0]
    assert len(answers) == 11 and set(map(tuple, answers.values())) == {(401, 401)}, answers
    found = served.call("support.trainer_engines:exposed")[0]
    assert found["addresses"] == {"127.0.0.1"} and found["modes"] <= {0} and found["readable"] == [], found


def test_two_engines_give_the_bits_of_one_before_and_after_a_sync(served):
    for version in (0, 1):
        both, first, second = (generate(served, alone=alone) for alone in (None, 0, 1))
        assert both == first == second and {told for *_, told in both} == {version}
        assert sum(len(tokens) for tokens, *_ in both) > 200
        if version == 0:
            served.call("support.trainer_engines:train", random_sequences(8, seed=42))
            assert_synced(served.call("support.trainer_engines:sync", 1)[0])


def test_engines_that_are_lost_in_a_sync_are_replaced_and_the_sync_is_proved(served):
    """One hangs, one is killed."""
    served.call("support.trainer_engines:train", random_sequences(8, seed=43))
    report = served.call("support.trainer_engines:sync_through", {0: "hang", 1: "kill"}, 2, seconds=START)[0]
    assert_synced(report, restarts=2)
    assert report["recovery_seconds"] > 1
    lines = served.call("support.trainer_engines:said")[0]
    assert any(line.startswith("engine 1 is lost: ") and "its process ended with exit code -9" in line for line in lines), lines
    assert any("engine 0 is lost: " in line and f"silent for {HEALTH:g} s, rollout.health_timeout" in line for line in lines), lines
    assert any("engines serve policy version 2 again, proved" in line for line in lines), lines
    both, first, second = (generate(served, alone=alone) for alone in (None, 0, 1))
    assert both == first == second and {told for *_, told in both} == {2}


def test_the_other_engine_takes_over_from_one_whose_connection_breaks_and_all_end_with_the_trainer(served):
    """Last, for nothing is left afterwards: the trainer is killed while its engines stand still, one of them just starting."""
    wanted = generate(served, 100)
    found = served.call("support.trainer_engines:generate_through", {0: "cut requests"}, 2, PROMPTS, 100)[0]
    assert found["said"] == wanted
    assert any("engine 0 is lost: " in line and "still runs" in line for line in served.call("support.trainer_engines:said")[0])
    trainer, *below = family(served.pid())
    for process in but_trackers(below):
        process.suspend()
    trainer.kill()
    assert len(below) >= 4 and alive_after(below, 20) == []
