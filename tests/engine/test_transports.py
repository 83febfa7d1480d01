"""Every transport that runs on a CPU into a real engine under load: each completion belongs to one policy version as a whole."""

from __future__ import annotations

import pytest
from support.models import FP8, TENSORS, random_sequences

from megatron_rl.errors import RunError

pytestmark = pytest.mark.slow

BATCH = random_sequences(8, seed=21)
PROMPTS = [sequence.prompt_ids for sequence in random_sequences(8, seed=22)]
TOKENS = 48


@pytest.fixture(scope="module")
def served(new_world, checkpoint, tmp_path_factory):
    """A trainer and its engine; the tests of this module share them in order."""
    world = new_world()
    world.call("support.trainer_engine:start", checkpoint, tmp_path_factory.mktemp("transports"), FP8, seconds=270)
    return world


WAYS = {
    "shared_memory": {"transport": "shared_memory"},
    "process_group": {"transport": "process_group", "bucket_mb": 1},
    "disk": {"transport": "disk"},
    "staged": {"transport": "shared_memory", "staged": True},
    "staged group": {"transport": "process_group", "staged": True, "running": "restart"},
    "restart": {"transport": "shared_memory", "running": "restart"},
    "reread": {"transport": "shared_memory", "proof": "reread"},
}


@pytest.mark.parametrize("way", WAYS)
def test_requests_that_run_during_syncs_belong_to_one_version_each(served, way, tmp_path):
    settings = {**WAYS[way], "timeout": 30.0}
    if settings["transport"] == "disk":
        settings["dir"] = tmp_path
    first = 1 + 10 * list(WAYS).index(way)
    found = served.call("support.async_runs:switch_under_load", settings, first, 2, BATCH, PROMPTS, TOKENS, seconds=200)[0]
    assert [report["proved"] for report in found["reports"]] == [TENSORS] * 2
    assert all(report["bytes"] > 0 and 0 < report["proof_seconds"] < report["seconds"] for report in found["reports"])
    assert max(found["running"]) > 0 and found["mixed"] == 0  # the question was put
    assert set(found["logprobs"]) == {first, first + 1, first + 2}
    for version, (engine, trainer) in found["logprobs"].items():
        difference = (engine - trainer).abs()
        assert len(difference) >= 100
        # a completion that began under another version would be off by 0.01 and more over many tokens; see test_same_bytes
        assert difference.mean() < 2e-4 and difference.median() < 1e-5, (version, difference.mean())
    assert list(tmp_path.iterdir()) == []


def test_a_byte_changed_on_its_way_is_found_before_it_is_served(served):
    with pytest.raises(RunError, match=r"the sync is not proved: .* of engine rank 0 differs from .* of trainer rank 0; first in rows"):
        served.call("support.async_runs:sync_with_wrong_byte", {"transport": "shared_memory"}, 90)
    assert served.call("support.trainer_engine:sync", 91, 16 << 20)[0]["proved"] == TENSORS


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_trainer_that_fails_in_the_middle_is_one_error_in_bounded_time(served, transport):
    with pytest.raises(RunError, match=r"^the sync broke: trainer rank 0: out of memory, say; engine rank 0 could not finish: \w+Error: "):
        served.call("support.async_runs:sync_that_breaks", {"transport": transport, "timeout": 20.0}, 92, seconds=60)
    assert served.call("support.trainer_engine:sync", 93, 16 << 20)[0]["proved"] == TENSORS
