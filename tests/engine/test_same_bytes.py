"""The engine serves the trainer's bytes after loading, after every sync and after export; one wrong byte anywhere is found and named."""

import json
from string import ascii_lowercase

import engine_checks
import pytest
import torch
from support import trainer, trainer_engine, transformers_reference
from support.models import TENSORS, random_sequences, read_weights
from support.planted_differences import plant_difference
from support.trainer_engine import current

from megatron_rl.diagnosis.graph_check import check_graph
from megatron_rl.errors import RunError
from rollout_sglang.hooks.scheduling import MIN_SHARED

pytestmark = pytest.mark.xdist_group("unified")  # they share an engine

PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(8, seed=11)]
WHOLE = 16 << 20


def change_trainer(name, row, col):
    """Flip the lowest bit of one element of the trainer, without telling the engine."""
    element = current().trainer.collect_named_tensors()[name][row : row + 1, col : col + 1]
    element.view(torch.uint8)[0, 0] ^= 1


def restart_engines(model):
    """Stop the engines and start new ones on another checkpoint."""
    current().rank0_engines.run(lambda engines: engines.stop())
    current().start_engines(model)


def check_graphs(folder, plant=""):
    """Compare the live graphs as at the start of a run."""
    trainer = current().trainer
    with plant_difference(trainer.model, plant):
        check_graph(trainer.model, current().rank0_engines, trainer.contract, folder, exact=True)


def assert_same(world, version):
    """Check everything, and the log-probs of what the engine serves as `version`."""
    world.call(trainer_engine.check_live)
    assert world.call(trainer_engine.prove) == [TENSORS]
    generated = world.call(trainer_engine.generate, PROMPTS)[0]
    assert generated["versions"] == {version}
    assert len(generated["engine"]) >= 50
    assert torch.equal(generated["engine"], generated["trainer"])  # the same bytes, and operators that do not depend on the batch


def test_what_was_just_started_passes_all_checks_and_the_live_graphs_are_alike(unified, tmp_path):
    assert_same(unified, 0)
    lines, training, rollout = unified.call(trainer_engine.compare_graphs)[0]
    assert lines == [] and set(rollout.edges) == set(training.select_forward().edges)
    quantized = [edge for edge in rollout.edges if edge.format.granularity]
    assert len(quantized) == 8  # input and weight of qkv, output, gate_up and down
    assert {node.detail for node in rollout.nodes if node.op == "attention"} == {"TorchNativeAttnBackend"}
    unified.call(check_graphs, tmp_path)
    written = json.loads((tmp_path / "graph.json").read_text())
    assert written["differences"] == [] and [part["part"] for part in written["training"]] == ["model", "layer 0"]
    line = r"mlp.down.weight -> mlp.down \(weight\) is e4m3 128x128 pow2 in the rollout, e4m3 64x64 pow2 in training"
    with pytest.raises(RunError, match=rf"not a subgraph of the training graph: layer 0: .*{line}"):
        unified.call(check_graphs, tmp_path, "granularity")
    assert {each["verdict"] for each in written["kernels"]} == {"same kernel", "same order"} and len(written["kernels"]) == 15
    line = r"promises a mismatch of 0, but norm: the engine computes with kernels.batch_invariant.rms_norm .*, the trainer with torch"
    with pytest.raises(RunError, match=line):
        unified.call(check_graphs, tmp_path, "another norm")


def test_answers_of_several_turns_are_those_tokens_for_the_trainer_too(unified):
    """Every turn's log-probs have the bits of one forward pass over the whole response, and every token is the one that was sampled."""
    answers = unified.call(trainer_engine.converse, [f"{number}+1=" for number in range(12)], 0, 40, 4)[0]
    dialogues = [parts for parts in answers["parts"] if len(parts) > 1]
    assert len(dialogues) >= 6 and {len(parts) for parts in dialogues} & {5, 7}, answers["parts"]
    for parts, reason, sampled in zip(answers["parts"], answers["finish"], answers["sampled"], strict=True):
        policy, environment = parts[::2], parts[1::2]
        assert environment == [f"={number}=" for number in range(1, len(policy))], "the engine stops where a stop string ends, and keeps it"
        assert all(turn[-1] in ascii_lowercase and not set(turn[:-1]) & set(ascii_lowercase) for turn in policy[:-1]), policy
        assert sampled <= 40 and reason in ("stop", "length", "turns") and (reason != "turns" or len(policy) == 4)
    assert len(answers["engine"]) == sum(answers["sampled"]) >= 100
    assert torch.equal(answers["engine"], answers["whole"]) and torch.equal(answers["engine"], answers["trainer"])


def test_what_agents_ask_through_the_endpoint_is_what_the_direct_path_gives(unified):
    """Agents in their own processes edit their history. A random model writes what no tokenizer would encode that way."""
    agents = unified.call(engine_checks.sample_by_agents, 6, 40, 0)[0]
    assert agents["errors"] == [""] * 6 and agents["conversations"] == 12 and agents["versions"] == {0}
    assert all(agents["same"]) and len(agents["same"]) == 18 and all(agents["held"]) and agents["sampled"] == 0
    assert len(agents["engine"]) >= 100 and torch.equal(agents["engine"], agents["trainer"])


def test_cached_tokens_and_chunks_of_a_prompt_change_no_bit(unified):
    """Groups share prompts of one token up to more than a chunk and a block of keys; then comes the next turn."""
    generator = torch.Generator().manual_seed(13)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 2, 17, 33, 40, 41, 150)]
    groups = [prompt for prompt in prompts for _ in range(4)]
    unified.call(trainer_engine.sync, 0)
    first = unified.call(trainer_engine.generate, groups, 12, {"seed": 1})[0]
    for number, prompt in list(enumerate(prompts))[3:]:
        saved = sorted(first["cached"][4 * number : 4 * number + 4])
        assert saved[0] <= 1 and saved[1] >= len(prompt) - 1 - MIN_SHARED, "one member computes the prompt, the others its end"
    again = unified.call(trainer_engine.generate, groups[::-1], 12, {"seed": 1})[0]
    assert again["cached"] == [len(prompt) - 1 for prompt in groups[::-1]]
    assert again["samples"] == first["samples"][::-1], "one seed draws the same tokens from the same bits"
    turns = [prompt + answer + [7, 8] for prompt, answer in first["samples"]]
    second = unified.call(trainer_engine.generate, turns, 12)[0]
    saved = zip(second["cached"], turns, strict=True)
    assert all(cached >= len(turn) - 3 for cached, turn in saved), "all but the last sampled token, which nothing was computed of"
    for answers in (first, again, second):
        assert torch.equal(answers["engine"], answers["trainer"])


def test_after_an_optimizer_step_only_a_sync_of_any_bucket_size_makes_them_equal_again(unified):
    unified.call(trainer_engine.train, random_sequences(8, seed=12))
    with pytest.raises(RunError, match="the sync is not proved"):
        unified.call(trainer_engine.prove)
    stale = unified.call(trainer_engine.generate, PROMPTS)[0]
    assert stale["versions"] == {0}
    assert (stale["engine"] - stale["trainer"]).abs().mean() > 0.01  # the comparison above can fail
    reports = [unified.call(trainer_engine.sync, version, size)[0] for version, size in ((1, 1 << 20), (2, 5000), (3, WHOLE))]
    assert all(report["proved"] == report["tensors"] == TENSORS and report["blocks"] > 0 for report in reports)
    assert len({report["bytes"] for report in reports}) == 1
    assert reports[1]["chunks"] > 100 and reports[2]["chunks"] == 1
    assert_same(unified, 3)


QKV, DOWN_SCALE = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc2.weight_scale_inv"
IN_TRAINER = {  # rank 0's linear_qkv is [q0 k0 v0 q1 k1 v1] in rows of 128, the engine's qkv_proj [q0 q1 k0 k1 v0 v1]
    (QKV, 3 * 128 + 5, 130): r"qkv_proj\.weight of engine rank 0 .*linear_qkv.weight of trainer rank 0; .*rows 128\.\.255, columns "
    r"128\.\.255 \(fp8\)",
    (DOWN_SCALE, 1, 3): r"down_proj\.weight_scale_inv of engine rank 0 .*rows 1\.\.1, columns 3\.\.3 \(scale\)",
    ("embedding.word_embeddings.weight", 300, 7): r"embed_tokens\.weight of engine rank 0 .*rows 256\.\.383, columns 0\.\.127 \(fp32\)",
}
IN_ENGINE = {
    ("model.layers.0.self_attn.qkv_proj.weight", 130, 255): r"qkv_proj\.weight of engine rank 0 .*rows 128\.\.255, columns 128\.\.255 "
    r"\(fp8\)",
    ("model.layers.0.mlp.gate_up_proj.weight_scale_inv", 7, 1): r"gate_up_proj\.weight_scale_inv holds scales that are fp32",
    ("model.norm.weight", 255, 0): r"model\.norm\.weight of engine rank 0 .*final_layernorm.*rows 128\.\.255, columns 0\.\.0 \(fp32\)",
}


def change_and_prove(unified, element):
    """A scale that is no power of two is found in the sync that sends it."""
    unified.call(trainer_engine.change_engine, *element)
    unified.call(trainer_engine.prove)


def test_one_bit_changed_on_either_side_is_named_and_mended(unified):
    for element, line in IN_TRAINER.items():
        unified.call(change_trainer, *element)
        with pytest.raises(RunError, match=line):
            unified.call(trainer_engine.prove)
        unified.call(change_trainer, *element)  # the same bit again
        assert unified.call(trainer_engine.prove) == [TENSORS]
    for element, line in IN_ENGINE.items():
        with pytest.raises(RunError, match=line):
            change_and_prove(unified, element)
        assert unified.call(trainer_engine.sync, 4, WHOLE)[0]["proved"] == TENSORS


@pytest.mark.long
def test_an_exported_fp8_checkpoint_gives_a_fresh_engine_the_same_bytes(unified, new_world, tmp_path):
    """While it starts, the BF16 export of the same checkpoint is compared with the masters rounded once, and loaded by transformers."""
    other = new_world()
    saved = unified.call(trainer_engine.ask, "trainer.save", tmp_path / "step_00001")[0]
    masters = unified.call(trainer_engine.ask, "trainer.collect_tensors", False)[0]
    fp8 = other.call(trainer.export, saved, tmp_path / "fp8", "fp8")[0]
    unified.send(restart_engines, fp8)
    bf16 = other.call(trainer.export, saved, tmp_path / "bf16", "bf16")[0]
    exported = read_weights(bf16)
    assert exported.keys() == masters.keys()
    assert all(torch.equal(exported[name], masters[name].bfloat16()) for name in masters)
    logits = other.call(transformers_reference.logits, bf16, [PROMPTS[0]])[0]
    assert logits.isfinite().all() and logits.std() > 0.1

    unified.receive(seconds=900)
    assert_same(unified, 0)
