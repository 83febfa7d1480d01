"""Weight switches of a real engine under load, generation ahead of the trainer, and access to the engine."""

from __future__ import annotations

import pytest
import torch
from support import async_runs, engine_checks, trainer_engine
from support.models import TENSORS, random_sequences

from megatron_rl.errors import RunError

BATCH = random_sequences(8, seed=21)
PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(8, seed=22)]
TOKENS, STEPS = 48, 5
SETTINGS = {
    "shared_memory": {"transport": "shared_memory", "running": "restart", "proof": "reread"},
    "process_group": {"transport": "process_group", "bucket_mb": 1, "staged": True},
    "disk": {"transport": "disk"},
    "plain group": {"transport": "process_group"},
    "staged": {"transport": "shared_memory", "staged": True},
    "staged group": {"transport": "process_group", "staged": True, "running": "restart"},
}
DEFAULT = ("process_group",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in SETTINGS])
def test_requests_that_run_during_syncs_belong_to_one_version_each(unified, name, tmp_path):
    settings = {**SETTINGS[name], "timeout": 300.0}
    if name == "disk":
        settings["dir"] = tmp_path
    first = 1 + 10 * list(SETTINGS).index(name)
    results = unified.call(async_runs.switch_under_load, settings, first, 2, BATCH, PROMPTS, TOKENS)[0]
    assert [report["proved"] for report in results["reports"]] == [TENSORS] * 2
    assert all(report["bytes"] > 0 and 0 < report["proof_seconds"] < report["seconds"] for report in results["reports"])
    assert max(results["running"]) > 0 and results["mixed"] == 0  # the question was put
    assert set(results["logprobs"]) == {first, first + 1, first + 2}
    for version, (engine, trainer) in results["logprobs"].items():
        difference = (engine - trainer).abs()
        assert len(difference) >= 100
        # a completion that began under another version would be off by 0.01 and more over many tokens; see test_same_bytes
        assert difference.mean() < 2e-4 and difference.median() < 1e-5, (version, difference.mean())
    assert list(tmp_path.iterdir()) == []


def test_completions_that_go_on_over_a_switch_have_the_log_probs_of_each_tokens_version(unified):
    """The new weights compute the old tokens again, so a token's log-prob depends only on its version, to the bit."""
    results = unified.call(async_runs.switch_under_load, {"running": "continue"}, 1, 3, BATCH, PROMPTS, TOKENS)[0]
    assert [report["proved"] for report in results["reports"]] == [TENSORS] * 3
    assert max(results["running"]) > 0 and results["mixed"] > 0
    assert set(results["logprobs"]) == {1, 2, 3, 4}
    for version, (engine, trainer) in results["logprobs"].items():
        assert len(engine) >= 50 and torch.equal(engine, trainer), (version, (engine - trainer).abs().max())


def test_an_engine_serves_beside_a_transformer_engine_that_cannot_be_imported(unified):
    """SGLang imports Megatron for its dumper, and Megatron imports Transformer Engine if it is installed. Every engine of `launched` has
    a broken one."""
    assert unified.call(trainer_engine.import_in_child, "transformer_engine")[0] == "FileNotFoundError: libtransformer_engine.so"
    assert unified.call(trainer_engine.sync, 80)[0]["proved"] == TENSORS


def test_a_byte_changed_on_its_way_is_found_before_it_is_served(unified):
    with pytest.raises(RunError, match=r"the sync is not proved: .* of engine rank 0 differs from .* of trainer rank 0; first in rows"):
        unified.call(async_runs.sync_with_wrong_byte, {"transport": "shared_memory"}, 90)
    assert unified.call(trainer_engine.sync, 91)[0]["proved"] == TENSORS


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_trainer_that_fails_in_the_middle_is_one_error(unified, transport):
    with pytest.raises(RunError, match=r"^the sync broke: trainer rank 0: out of memory, say; engine rank 0 could not finish: \w+Error: "):
        unified.call(async_runs.sync_that_breaks, {"transport": transport, "timeout": 20.0}, 92)
    assert unified.call(trainer_engine.sync, 93)[0]["proved"] == TENSORS


@pytest.mark.parametrize(
    "running, max_staleness",
    [("restart", 1), ("continue", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in [("continue", 1), ("finish", 1)])],
)
def test_no_token_is_older_than_the_bound(unified, running, max_staleness):
    results = unified.call(async_runs.run_ahead, running, max_staleness, STEPS)[0]
    rows, token_versions = results["rows"], results["token_versions"]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["sync/proved"] for row in rows] == [TENSORS] * (STEPS + 1)
    assert len(token_versions) == STEPS * 16 and results["position"] == results["drawn"], "no problem is skipped, none is drawn for nothing"
    ages = [version - sampled for version, versions in token_versions for sampled in versions]
    assert 0 in ages and max(ages) <= max_staleness, "the first groups are made at their own version, the others ahead"
    assert (rows[1]["staleness/max"], max(row["staleness/max"] for row in rows[1:])) == (0, max(ages))
    assert max_staleness > 1 or running != "finish" or 1 in ages, "what runs at a switch may be sampled anew, or go on, by newer weights"
    assert all(row.get("mismatch/abs_max", 0.0) < 1e-5 for row in rows[1:]), "tokens of the trainer's own version"
    assert "mismatch/abs_max" in rows[1]
    assert not set(ages) - {0} or max(row.get("staleness/abs_mean", 0.0) for row in rows[2:]) > 1e-4
    assert running == "continue" or not any(len(set(versions)) > 1 for _, versions in token_versions)


def test_who_waits_gives_its_memory_back_and_the_next_sync_fills_it(unified):
    results = unified.call(async_runs.release_memory_and_take_it_back, 20, PROMPTS)[0]
    assert results["awake"] - results["released"] > 100, results
    assert results["again"] - results["released"] > 100, results
    assert results["waited"] and results["proved"] == TENSORS
    generated = unified.call(trainer_engine.generate, PROMPTS)[0]
    assert generated["versions"] == {22} and torch.equal(generated["engine"], generated["trainer"])


def test_nobody_without_the_key_is_answered_and_nothing_listens_on_other_interfaces(unified):
    statuses = unified.call(engine_checks.ask_without_key)[0]
    assert len(statuses) == 11 and set(map(tuple, statuses.values())) == {(401, 401)}, statuses
    exposed = unified.call(engine_checks.find_exposed)[0]
    assert exposed["addresses"] == {"127.0.0.1"} and exposed["modes"] <= {0} and exposed["readable"] == [], exposed
