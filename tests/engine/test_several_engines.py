"""Two real engines behind one face: the same completions as one gives, both proved at every sync, and losses that change no bit."""

from __future__ import annotations

import pytest
from support.models import FP8, random_sequences
from support.processes import alive_after, family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # two engines start three times

TENSORS = 3 + 4 + 4 * 2  # embedding, last norm, lm_head; four norms; four FP8 weights with their scales
PROMPTS = [sequence.prompt_ids for sequence in random_sequences(16, seed=41)]
HEALTH = 30.0
START = 520.0


@pytest.fixture(scope="module")
def served(new_world, checkpoint, tmp_path_factory):
    """A trainer and two engines. The tests of this module share them in order; each leaves them proved."""
    world = new_world()
    world.call("support.several:start", checkpoint, tmp_path_factory.mktemp("several"), FP8, 2, HEALTH, seconds=START)
    return world


def generate(world, tokens: int = 24, alone: int | None = None):
    return world.call("support.several:generate", PROMPTS, tokens, alone)[0]


def assert_synced(report, restarts: int = 0) -> None:
    assert (report["proved"], report["tensors"], report["restarts"]) == (2 * TENSORS, 2 * TENSORS, restarts)


def test_nobody_without_the_key_is_answered_and_nothing_listens_on_other_interfaces(served):
    answers = served.call("support.several:without_key")[0]
    assert len(answers) == 11 and set(map(tuple, answers.values())) == {(401, 401)}, answers
    found = served.call("support.several:exposed")[0]
    assert found["addresses"] == {"127.0.0.1"} and found["modes"] <= {0} and found["readable"] == [], found


def test_two_engines_give_the_bits_of_one_before_and_after_a_sync(served):
    for version in (0, 1):
        both, first, second = (generate(served, alone=alone) for alone in (None, 0, 1))
        assert both == first == second and {told for *_, told in both} == {version}
        assert sum(len(tokens) for tokens, *_ in both) > 200
        if version == 0:
            served.call("support.several:train", random_sequences(8, seed=42))
            assert_synced(served.call("support.several:sync", 1)[0])


def test_an_engine_killed_while_it_generates_and_one_that_hangs_in_a_sync(served):
    """The other one takes over; both have successors that serve the same bits, and nothing of the lost ones is left."""
    wanted = generate(served, 100)
    found = served.call("support.several:generate_through", "kill", 0, PROMPTS, 100)[0]
    assert found == {"said": wanted, "left": []}
    served.call("support.several:train", random_sequences(8, seed=43))
    assert_synced(served.call("support.several:sync_through", "hang", 1, 2, seconds=START)[0], restarts=2)
    lines = served.call("support.several:said")[0]
    assert any(line.startswith("engine 0 is lost: the engine does not answer /generate") for line in lines), lines
    assert any("engine 1 is lost" in line and f"silent for {HEALTH:g} s, rollout.health_timeout" in line for line in lines), lines
    assert any("serve policy version 2 again, proved" in line for line in lines), lines
    both, first, second = (generate(served, alone=alone) for alone in (None, 0, 1))
    assert both == first == second and {told for *_, told in both} == {2}


def test_an_engine_that_hangs_while_it_generates_and_one_killed_in_a_sync(served):
    wanted = generate(served, 100)
    found = served.call("support.several:generate_through", "hang", 1, PROMPTS, 100)[0]
    assert found == {"said": wanted, "left": []}
    report = served.call("support.several:sync_through", "kill", 0, 3, seconds=START)[0]
    assert_synced(report, restarts=2)
    assert report["recovery_seconds"] > 1
    assert generate(served, alone=0) == generate(served, alone=1)


def test_a_connection_that_breaks_in_a_sync_is_made_anew(served):
    report = served.call("support.several:sync_through", "cut ring", 1, 4)[0]
    assert_synced(report)
    assert report["recovery_seconds"] > 0
    assert {told for *_, told in generate(served)} == {4}


def test_an_engine_whose_connection_breaks_is_replaced_and_all_end_with_the_trainer(served):
    """Last, for nothing is left afterwards: the trainer is killed while one engine stands still and another one starts."""
    wanted = generate(served, 100)
    found = served.call("support.several:generate_through", "cut requests", 0, PROMPTS, 100)[0]
    assert found == {"said": wanted, "left": []}
    trainer, *below = family(served.pid())
    for process in below:
        process.suspend()
    trainer.kill()
    assert len(below) >= 4 and alive_after(below, 20) == []
