"""A trainer in high precision with a quantised engine: a dense model in FP8, one with experts in INT8. The engine serves what was quantised
at the sync, and computes as the contract says. Both engines start side by side."""

from __future__ import annotations

import pytest
from support.models import make_checkpoint, random_sequences

from megatron_rl.errors import RunError

pytestmark = pytest.mark.slow

FORMATS = {  # of the quantised edges of the engine's graph: weights and their inputs
    "fp8_rollout": {"e4m3 128x128 pow2", "e4m3 1x128 pow2"},
    "int8_rollout": {"int8 channel fp32", "int8 token fp32"},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DENSE_TENSORS = 3 + 4 + 4 * 2  # embedding, last norm, lm_head; four norms; four quantised weights with their scales
TENSORS = {"fp8_rollout": DENSE_TENSORS, "int8_rollout": DENSE_TENSORS + 1}  # a router; all experts are two tensors with scales
PROMPTS = [sequence.prompt_ids for sequence in random_sequences(8, seed=21)]


@pytest.fixture(scope="module")
def engines(new_world, checkpoint, tmp_path_factory):
    worlds = {mode: new_world() for mode in FORMATS}
    models = {"fp8_rollout": checkpoint, "int8_rollout": make_checkpoint(tmp_path_factory.mktemp("experts"), **EXPERTS)}
    for mode, world in worlds.items():
        world.send("support.trainer_engine:start", models[mode], tmp_path_factory.mktemp(mode), {"mode": mode, "high": "fp32"})
    for world in worlds.values():
        world.receive(seconds=240)
    return worlds


@pytest.fixture(params=FORMATS)
def mode(request):
    return request.param


@pytest.fixture
def served(mode, engines):
    """The tests share the engines in order; each leaves them proved."""
    return engines[mode]


def assert_the_engine_computes_as_emulated(served):
    found = served.call("support.trainer_engine:generate_and_emulate", PROMPTS)[0]
    error = (found["engine"] - found["emulated"]).abs()
    mismatch = (found["engine"] - found["trainer"]).abs()
    assert len(error) >= 50
    assert not error.any()  # the same operators; the bits of none depend on what else is computed
    assert mismatch.mean() > 1e-3  # what quantising itself does, which FlashRL's importance ratios have to make good


def test_the_engine_that_was_just_started_passes_all_checks_and_computes_as_emulated(served, mode):
    served.call("support.trainer_engine:check_live")
    assert served.call("support.trainer_engine:prove") == [TENSORS[mode]]
    _, _, rollout = served.call("support.trainer_engine:compare_served_graphs")[0]
    quantized = [str(edge.format) for edge in rollout.edges if edge.format.quantized]
    assert len(quantized) == 8 and set(quantized) == FORMATS[mode]  # qkv, output, gate_up, down
    assert_the_engine_computes_as_emulated(served)


def test_after_an_optimizer_step_a_sync_serves_the_newly_quantised_weights(served, mode):
    served.call("support.trainer_engine:train", random_sequences(8, seed=22))
    with pytest.raises(RunError, match="the sync is not proved"):
        served.call("support.trainer_engine:prove")
    for version in (1, 2):  # twice: SGLang processes its weights at the end of every update
        report = served.call("support.trainer_engine:sync", version, 1 << 16)[0]
        assert report["proved"] == report["tensors"] == TENSORS[mode] and report["chunks"] > 5
    served.call("support.trainer_engine:check_live")
    assert_the_engine_computes_as_emulated(served)


@pytest.mark.parametrize(
    "name, row, col, line",
    [
        ("self_attn.o_proj.weight", 130, 255, r"o_proj\.weight of engine rank 0 .*rows 128\.\.255, columns 128\.\.255 \(int8\)"),
        ("mlp.experts.w13_weight_scale", 519, 0, r"experts\.w13_weight_scale of .*rows 519\.\.519, columns 0\.\.0 \(scale\)"),  # expert 2
    ],
)
def test_one_bit_changed_in_an_int8_engine_is_named_and_the_next_sync_mends_it(engines, name, row, col, line):
    served = engines["int8_rollout"]
    served.call("support.trainer_engine:change_engine", f"model.layers.0.{name}", row, col)
    with pytest.raises(RunError, match=line):
        served.call("support.trainer_engine:prove")
    assert served.call("support.trainer_engine:sync", 3, 16 << 20)[0]["proved"] == TENSORS["int8_rollout"]
