"""A trainer in high precision with a quantised engine, FP8 or INT8: the engine serves what was quantised at the sync, and computes as the
contract says. Both engines start side by side."""

from __future__ import annotations

import pytest
from support.models import random_sequences

from megatron_rl.errors import RunError

pytestmark = pytest.mark.slow

MODES = ("fp8_rollout", "int8_rollout")
TENSORS = 3 + 4 + 4 * 2  # embedding, last norm, lm_head; four norms; four quantised weights with their scales
PROMPTS = [sequence.prompt_ids for sequence in random_sequences(8, seed=21)]


@pytest.fixture(scope="module")
def engines(new_world, checkpoint, tmp_path_factory):
    worlds = {mode: new_world() for mode in MODES}
    for mode, world in worlds.items():
        world.send("support.served:start", checkpoint, tmp_path_factory.mktemp(mode), {"mode": mode, "high": "fp32"})
    for world in worlds.values():
        world.receive(seconds=240)
    return worlds


@pytest.fixture(params=MODES)
def served(request, engines):
    """The tests share the engines in order; each leaves them proved."""
    return engines[request.param]


def assert_the_engine_computes_as_emulated(served):
    found = served.call("support.emulated:generate", PROMPTS)[0]
    error = (found["engine"] - found["emulated"]).abs()
    mismatch = (found["engine"] - found["trainer"]).abs()
    assert len(error) >= 50
    # sums of FP32 in another order (of attention and norms alone in INT8): 1e-6, but for activations that round to a neighbour
    assert error.median() < 1e-5 and error.mean() < 1e-4
    assert mismatch.mean() > 1e-3  # what quantising itself does, which FlashRL's importance ratios have to make good


def test_the_engine_that_was_just_started_passes_all_checks_and_computes_as_emulated(served):
    served.call("support.served:check_live")
    assert served.call("support.served:prove") == [TENSORS]
    assert_the_engine_computes_as_emulated(served)


def test_after_an_optimizer_step_a_sync_serves_the_newly_quantised_weights(served):
    served.call("support.served:train", random_sequences(8, seed=22))
    with pytest.raises(RunError, match="the sync is not proved"):
        served.call("support.served:prove")
    for version in (1, 2):  # twice: SGLang processes its weights at the end of every update
        report = served.call("support.served:sync", version, 1 << 16)[0]
        assert report["proved"] == report["tensors"] == TENSORS and report["buckets"] > 5
    served.call("support.served:check_live")
    assert_the_engine_computes_as_emulated(served)


@pytest.mark.parametrize(
    "name, row, col, line",
    [
        ("mlp.down_proj.weight", 130, 255, r"down_proj\.weight of engine rank 0 .*rows 128\.\.255, columns 128\.\.255 \(int8\)"),
        ("self_attn.qkv_proj.weight_scale", 7, 0, r"qkv_proj\.weight_scale of .*rows 7\.\.7, columns 0\.\.0 \(scale\)"),
    ],
)
def test_one_bit_changed_in_an_int8_engine_is_named_and_the_next_sync_mends_it(engines, name, row, col, line):
    served = engines["int8_rollout"]
    served.call("support.served:change_engine", f"model.layers.0.{name}", row, col)
    with pytest.raises(RunError, match=line):
        served.call("support.served:prove")
    assert served.call("support.served:sync", 3, 16 << 20)[0]["proved"] == TENSORS
