"""E4M3 keys and values in a live engine: too small a cache, its release and a switch of weights change no bit of a log-prob."""

import re

import engine_checks
import pytest
import torch
from support import trainer_engine
from support.models import FP8, TENSORS, random_sequences

pytestmark = pytest.mark.long
PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(16, seed=51)]
CANARY = {"canary": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module", params=["e4m3", "e4m3_per_layer"])
def world(request, new_world, checkpoint, folder):
    """An engine whose cache holds half of 16 responses of 100 tokens."""
    world, precision = new_world(), FP8 | {"kv": request.param}
    (folder / request.param).mkdir()
    world.call(trainer_engine.start, checkpoint, folder / request.param, precision, {"rollout": {"max_total_tokens": 1000}})
    return world


def assert_exact(world, version):
    generated = world.call(trainer_engine.generate, PROMPTS, 100)[0]
    assert generated["versions"] == {version} and len(generated["engine"]) > 1000
    assert torch.equal(generated["engine"], generated["trainer"])


def test_requests_that_are_retracted_and_computed_again(world, folder):
    world.call(trainer_engine.train, random_sequences(8, seed=52))
    assert world.call(trainer_engine.sync, 1, 1 << 20, CANARY)[0]["canary"] == 0.0
    assert_exact(world, 1)
    log = "".join(file.read_text(errors="replace") for file in folder.rglob("*.log"))
    assert re.search(r"Retract requests.*#retracted_reqs: [1-9]", log), log[-3000:]


def test_a_cache_that_was_given_back(world):
    results = world.call(engine_checks.release_memory_and_take_it_back, 10, PROMPTS)[0]
    assert results["waited"] and results["proved"] >= TENSORS  # scales of layers as well
    assert world.call(trainer_engine.sync, 13, 1 << 20, CANARY)[0]["canary"] == 0.0
    assert_exact(world, 13)


def test_completions_that_go_on_over_a_switch(world):
    batch, prompts = random_sequences(8, seed=53), PROMPTS[:8]
    results = world.call(engine_checks.switch_under_load, {"running": "continue", **CANARY}, 20, 3, batch, prompts, 48)[0]
    assert [report["canary"] for report in results["reports"]] == [0.0] * 3
    assert max(results["running"]) > 0 and results["mixed"] > 0 and set(results["logprobs"]) == {20, 21, 22, 23}
    for version, (engine, trainer) in results["logprobs"].items():
        assert len(engine) >= 50 and torch.equal(engine, trainer), (version, (engine - trainer).abs().max())
