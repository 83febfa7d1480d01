"""The engine serves the trainer's bytes: after loading, after every sync, after export; one wrong byte anywhere is found and named."""

from __future__ import annotations

import json
from string import ascii_lowercase

import pytest
import torch
from support.models import FP8, TENSORS, random_sequences, read_weights
from support.processes import alive_after, command_lines, family

from megatron_rl.errors import RunError

pytestmark = pytest.mark.slow

PROMPTS = [sequence.prompt_ids for sequence in random_sequences(8, seed=11)]
WHOLE = 16 << 20


@pytest.fixture(scope="module")
def served(new_world, checkpoint, tmp_path_factory):
    """A trainer and its engine. The tests of this module share them in order; each leaves them proved."""
    world = new_world()
    world.call("support.trainer_engine:start", checkpoint, tmp_path_factory.mktemp("served"), FP8, seconds=270)
    return world


def assert_same_logprobs(found, versions: set[int]) -> None:
    assert found["versions"] == versions
    assert len(found["engine"]) >= 50
    assert torch.equal(found["engine"], found["trainer"])  # the same blocks, and operators that do not depend on the batch


def test_the_engine_that_was_just_started_passes_all_checks(served):
    served.call("support.trainer_engine:check_live")
    assert served.call("support.trainer_engine:prove") == [TENSORS]
    assert_same_logprobs(served.call("support.trainer_engine:generate", PROMPTS)[0], {0})


def test_the_live_graphs_are_alike_and_a_difference_stops_a_run(served, tmp_path):
    lines, training, rollout = served.call("support.trainer_engine:compare_served_graphs")[0]
    assert lines == [] and set(rollout.edges) == set(training.select_forward().edges)
    quantized = [edge for edge in rollout.edges if edge.format.quantized]
    assert len(quantized) == 8  # input and weight of qkv, output, gate_up and down
    assert {node.detail for node in rollout.nodes if node.op == "attention"} == {"TorchNativeAttnBackend"}
    served.call("support.trainer_engine:check_served", tmp_path)
    kept = json.loads((tmp_path / "graph.json").read_text())
    assert kept["differences"] == [] and [part["part"] for part in kept["training"]] == ["model", "layer 0"]
    for plant, line in {
        "granularity": r"mlp.down.weight -> mlp.down \(weight\) is e4m3 128x128 pow2 in the rollout, e4m3 64x64 pow2 in training",
        "activation scales": r"attention.qkv \(x\) is e4m3 1x128 pow2 in the rollout, e4m3 1x128 fp32 in training",
        "high-precision layer": r"attention.output \(x\) is e4m3 1x128 pow2 in the rollout, fp32 in training",
        "dtype": r"input_norm.weight -> input_norm \(weight\) is fp32 in the rollout, fp16 in training",
    }.items():
        with pytest.raises(RunError, match=rf"no subgraph of the training: layer 0: .*{line}"):
            served.call("support.trainer_engine:check_served", tmp_path, plant)


def test_answers_of_several_turns_are_those_tokens_for_the_trainer_too(served):
    """Every turn's log-probs are what one forward pass over the whole answer gives, to the bit; every token is one that was sampled."""
    found = served.call("support.trainer_engine:converse", [f"{number}+1=" for number in range(12)], 0, 40, 4)[0]
    talks = [parts for parts in found["parts"] if len(parts) > 1]
    assert len(talks) >= 6 and {len(parts) for parts in talks} & {5, 7}, found["parts"]
    for parts, reason, sampled in zip(found["parts"], found["finish"], found["sampled"], strict=True):
        policy, environment = parts[::2], parts[1::2]
        assert environment == [f"={number}=" for number in range(1, len(policy))], "the engine stops where a stop string ends, and keeps it"
        assert all(turn[-1] in ascii_lowercase and not set(turn[:-1]) & set(ascii_lowercase) for turn in policy[:-1]), policy
        assert sampled <= 40 and reason in ("stop", "length", "turns") and (reason != "turns" or len(policy) == 4)
    assert len(found["engine"]) == sum(found["sampled"]) >= 100
    assert torch.equal(found["engine"], found["whole"]) and torch.equal(found["engine"], found["trainer"])


def test_after_an_optimizer_step_only_a_sync_makes_them_equal_again(served):
    served.call("support.trainer_engine:train", random_sequences(8, seed=12))
    with pytest.raises(RunError, match="the sync is not proved"):
        served.call("support.trainer_engine:prove")
    stale = served.call("support.trainer_engine:generate", PROMPTS)[0]
    assert stale["versions"] == {0}
    assert (stale["engine"] - stale["trainer"]).abs().mean() > 0.01  # the comparison above can fail
    report = served.call("support.trainer_engine:sync", 1, 1 << 20)[0]
    assert report["proved"] == report["tensors"] == TENSORS and report["blocks"] > 0
    assert_same_logprobs(served.call("support.trainer_engine:generate", PROMPTS)[0], {1})


def test_a_bucket_of_a_few_kib_moves_the_same_bytes(served):
    served.call("support.trainer_engine:train", random_sequences(8, seed=13))
    small, large = (served.call("support.trainer_engine:sync", version, size)[0] for version, size in ((2, 5000), (3, WHOLE)))
    assert small["chunks"] > 100 and large["chunks"] == 1
    assert small["bytes"] == large["bytes"] and small["proved"] == TENSORS
    assert_same_logprobs(served.call("support.trainer_engine:generate", PROMPTS)[0], {3})


DATA, SCALE = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc2.weight_scale_inv"


@pytest.mark.parametrize(
    "name, row, col, line",
    [  # rank 0's linear_qkv is [q0 k0 v0 q1 k1 v1] in rows of 128, the engine's qkv_proj [q0 q1 k0 k1 v0 v1]
        (
            DATA,
            3 * 128 + 5,
            130,
            r"qkv_proj\.weight of engine rank 0 .*linear_qkv.weight of trainer rank 0; .*rows 128\.\.255, columns 128\.\.255 \(fp8\)",
        ),
        (SCALE, 1, 3, r"down_proj\.weight_scale_inv of engine rank 0 .*rows 1\.\.1, columns 3\.\.3 \(scale\)"),
        ("embedding.word_embeddings.weight", 300, 7, r"embed_tokens\.weight of engine rank 0 .*rows 256\.\.383, columns 0\.\.127 \(high\)"),
    ],
)
def test_one_bit_changed_in_the_trainer_is_named(served, name, row, col, line):
    served.call("support.trainer_engine:change_trainer", name, row, col)
    with pytest.raises(RunError, match=line):
        served.call("support.trainer_engine:prove")
    served.call("support.trainer_engine:change_trainer", name, row, col)  # the same bit again
    assert served.call("support.trainer_engine:prove") == [TENSORS]


@pytest.mark.parametrize(
    "name, row, col, line",
    [
        (
            "model.layers.0.self_attn.qkv_proj.weight",
            130,
            255,
            r"qkv_proj\.weight of engine rank 0 .*rows 128\.\.255, columns 128\.\.255 \(fp8\)",
        ),
        (
            "model.layers.0.mlp.gate_up_proj.weight_scale_inv",
            7,
            1,
            r"gate_up_proj\.weight_scale_inv of .*rows 7\.\.7, columns 1\.\.1 \(scale\)",
        ),
        ("model.norm.weight", 255, 0, r"model\.norm\.weight of engine rank 0 .*final_layernorm.*rows 128\.\.255, columns 0\.\.0 \(high\)"),
    ],
)
def test_one_byte_changed_in_the_engine_is_named_and_the_next_sync_mends_it(served, name, row, col, line):
    served.call("support.trainer_engine:change_engine", name, row, col)
    with pytest.raises(RunError, match=line):
        served.call("support.trainer_engine:prove")
    assert served.call("support.trainer_engine:sync", 4, WHOLE)[0]["proved"] == TENSORS


def test_an_exported_fp8_checkpoint_gives_a_fresh_engine_the_same_bytes(served, new_world, tmp_path_factory):
    """While it starts: the BF16 export of the same checkpoint is the masters rounded once, and transformers loads it."""
    folder, other = tmp_path_factory.mktemp("export"), new_world()
    saved = served.call("support.trainer_engine:save_run_checkpoint", folder / "step_00001")[0]
    masters = served.call("support.trainer_engine:masters")[0]
    fp8 = other.call("support.trainer_engine:export", saved, folder / "fp8", "fp8")[0]
    served.send("support.trainer_engine:restart_engine", fp8, folder)
    bf16 = other.call("support.trainer_engine:export", saved, folder / "bf16", "bf16")[0]
    exported = read_weights(bf16)
    assert exported.keys() == masters.keys()
    assert all(torch.equal(exported[name], masters[name].bfloat16()) for name in masters)
    logits = new_world().call("support.transformers_reference:logits", bf16, [PROMPTS[0]])[0]
    assert logits.isfinite().all() and logits.std() > 0.1

    served.receive(seconds=270)
    served.call("support.trainer_engine:check_live")
    assert served.call("support.trainer_engine:prove") == [TENSORS]
    assert_same_logprobs(served.call("support.trainer_engine:generate", PROMPTS)[0], {0})


def test_everything_ends_by_itself_when_the_trainer_is_killed(served):
    """Last, for nothing is left afterwards."""
    trainer, *below = family(served.pid())
    assert len(below) >= 3  # server, scheduler, detokenizer
    trainer.kill()
    assert command_lines(alive_after(below, 20)) == {}
