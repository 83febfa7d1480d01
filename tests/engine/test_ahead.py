"""A real engine that generates while the trainer trains: whose tokens they are, how old they get, and whose turn the memory is."""

from __future__ import annotations

import pytest
import torch
from support.models import FP8, TENSORS, random_sequences
from support.processes import alive_after, command_lines, family

pytestmark = pytest.mark.slow

BATCH = random_sequences(8, seed=31)
PROMPTS = [sequence.prompt_ids for sequence in random_sequences(8, seed=32)]
STEPS = 5


@pytest.fixture(scope="module")
def served(new_world, checkpoint, tmp_path_factory):
    """A trainer and its engine; the tests of this module share them in order."""
    world = new_world()
    world.call("support.async_runs:start", checkpoint, tmp_path_factory.mktemp("ahead"), FP8, seconds=270)
    return world


def test_completions_that_go_on_over_a_switch_have_the_log_probs_of_each_tokens_version(served):
    """The new weights read the old tokens anew, so a token's log-prob is that of its version alone, to the bit."""
    found = served.call("support.async_runs:switch_under_load", {"running": "continue"}, 1, 3, BATCH, PROMPTS, 48, seconds=200)[0]
    assert [report["proved"] for report in found["reports"]] == [TENSORS] * 3
    assert max(found["running"]) > 0 and found["mixed"] > 0
    assert set(found["logprobs"]) == {1, 2, 3, 4}
    for version, (engine, trainer) in found["logprobs"].items():
        assert len(engine) >= 50 and torch.equal(engine, trainer), (version, (engine - trainer).abs().max())


@pytest.mark.parametrize("running", ["continue", "restart", "finish"])
def test_no_token_is_older_than_the_bound(served, running):
    found = served.call("support.async_runs:run_ahead", running, 1, STEPS, seconds=200)[0]
    rows, made = found["rows"], found["made"]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["sync/proved"] for row in rows] == [TENSORS] * (STEPS + 1)
    assert len(made) == STEPS * 16 and found["position"] == found["drawn"], "no problem is skipped, none is drawn for nothing"
    ages = [version - sampled for version, versions in made for sampled in versions]
    assert 0 in ages and max(ages) <= 1, "the first groups are made at their own version, the others ahead"
    assert running != "finish" or 1 in ages, "what runs at a switch may be sampled anew, or go on, in the newer version"
    assert (rows[1]["staleness/max"], max(row["staleness/max"] for row in rows[1:])) == (0, max(ages))
    assert rows[1]["mismatch/abs_max"] < 1e-5, "tokens of the trainer's own version"
    assert all(row.get("mismatch/abs_max", 0.0) < 1e-5 for row in rows[1:])
    assert 1 not in ages or max(row.get("staleness/abs_mean", 0.0) for row in rows[2:]) > 1e-4
    mixed = any(len(set(versions)) > 1 for _, versions in made)
    assert not mixed or running == "continue"


def test_with_a_bound_of_two_it_may_be_two_versions_ahead(served):
    found = served.call("support.async_runs:run_ahead", "continue", 2, STEPS, seconds=200)[0]
    ages = {version - sampled for version, versions in found["made"] for sampled in versions}
    assert {0, 1} < ages | {2} and max(ages) <= 2
    assert [row["sync/proved"] for row in found["rows"]] == [TENSORS] * (STEPS + 1)


def test_who_waits_gives_its_memory_back_and_the_next_sync_fills_it(served):
    """The cache takes 64 MiB for each of keys and values."""
    found = served.call("support.async_runs:give_memory_back_and_take_it_again", 20, PROMPTS, seconds=120)[0]
    assert found["awake"] - found["released"] > 100, found
    assert found["again"] - found["released"] > 100, found
    assert found["waited"] and found["proved"] == TENSORS
    again = served.call("support.trainer_engine:generate", PROMPTS)[0]
    assert again["versions"] == {22} and torch.equal(again["engine"], again["trainer"])


def test_nothing_is_left(served):
    """Last: the engine ends with its trainer, also while requests run."""
    trainer, *below = family(served.pid())
    served.send("support.trainer_engine:generate_until_it_fails", PROMPTS)
    trainer.kill()
    assert len(below) >= 3 and command_lines(alive_after(below, 20)) == {}
