"""The shipped configurations, and a dense one with four stages, run without GPUs and take the planned memory.

The default tests rehearse two layers of the 8B with its engines, two layers of the 9B, and the last rank of the 235B; the long tests
all kinds of ranks, or the first and the last rank of hybrid models, and all engines.
"""

import json

import pytest
from support.shipped import ROOT, check_aims, check_exposed, few_layers, rehearse_shipped, rehearse_trainers

STAGES = "--train.layout.pp=4,--train.layout.last_stage_layers=13,--train.layout.dp=1"
COUNTS = "megatron_rl/mcore/layers/moe/token_counts.py"
LAYERS = {"qwen2_5_32b": 0, "qwen3_30b_a3b": 22, "qwen3_235b_a22b": 4}
"""Number of layers with experts on the last stage."""
EXCHANGES = {"qwen2_5_32b": set(), "qwen3_30b_a3b": {"ep 8", "etp*ep 8"}, "qwen3_235b_a22b": {"ep 8", "etp*ep 8", "tp 8"}}
"""Groups of all-to-alls: tokens of experts, their counts before an update, and heads if ranks share a key-value head."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The last rank of the 235B, and rank 0 of a gated delta net with an attention layer, rehearsed by one process."""
    folder, kinds = tmp_path_factory.mktemp("hybrid"), ["linear_attention", "full_attention"]
    fields = json.loads((ROOT / "configs" / "models" / "Qwen3.5-9B" / "config.json").read_text())["text_config"]
    architecture = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2, "layer_types": kinds, "full_attention_interval": 2}
    (folder / "config.json").write_text(json.dumps(fields | architecture | {"tie_word_embeddings": False}))
    return rehearse_trainers("qwen3_235b_a22b,h100,last", f"qwen3_5_9b,h100,0,--model.path={folder}")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "qwen3_235b_a22b")) for name in LAYERS])
def test_the_last_rank_runs_and_waits_once_a_layer_for_what_experts_get_in_the_first_pass(name, ranks):
    (rank,) = (ranks if name in ranks else rehearse_trainers(f"{name},h100,last" + f",{STAGES}" * (name == "qwen2_5_32b")))[name]
    assert rank["passes"] and not rank["fault"], rank["fault"]
    check_aims(rank)
    for phase in rank["phases"]:
        within = {wait["line"]: wait["in_micro_batches"] for wait in phase["host_waits"] if wait["in_micro_batches"]}
        assert all(line.startswith(COUNTS) for line in within), phase["phase"]
        assert sum(within.values()) == LAYERS[name] * phase["micro_batches"] * (phase["phase"] == "logprobs"), phase["phase"]
    update = next(phase for phase in rank["phases"] if phase["phase"] == "update 2")
    assert {entry["group"] for entry in update["collectives"] if entry["kind"] == "all-to-all"} == EXCHANGES[name]


def test_two_layers_run_with_their_engines(tmp_path):
    found = rehearse_shipped("qwen3_8b", tmp_path, f"--model.path={few_layers('Qwen3-8B', tmp_path)}")
    (trainer,), engines = found["trainer"], found["engine"]
    assert len(engines) == 2 and not any(wait["in_micro_batches"] for phase in trainer["phases"] for wait in phase["host_waits"])


@pytest.mark.long
def test_a_gated_delta_net_and_an_attention_layer_take_the_planned_memory(ranks):
    (rank,) = ranks["qwen3_5_9b"]
    check_hybrid(rank, has_experts=False)


HYBRIDS = [("qwen3_5_9b", [0]), ("qwen3_5_35b_a3b", [1, 0]), ("qwen3_next_80b_a3b", [3, 0]), ("qwen3_5_122b_a10b", [7, 0])]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "stages"), HYBRIDS)
def test_first_and_last_ranks_of_hybrid_models_and_their_engines_run(name, stages, tmp_path):
    found = rehearse_shipped(name, tmp_path, "--ranks", "0,last")
    assert list(dict.fromkeys(rank["stage"] for rank in found["trainer"])) == stages and len(found["engine"]) == 2
    for rank in found["trainer"]:
        check_hybrid(rank, name != "qwen3_5_9b")


def check_hybrid(rank, has_experts):
    """Check that a rank runs as planned, waits only in the first pass, for token counts, and exposes less than 25 % of its bounds."""
    assert rank["passes"] and not rank["fault"], rank["fault"]
    waits = [(wait["line"], phase["phase"]) for phase in rank["phases"] for wait in phase["host_waits"] if wait["in_micro_batches"]]
    assert all(line.startswith(COUNTS) and phase == "logprobs" for line, phase in waits) and bool(waits) == has_experts
    check_exposed(rank)


CASES = [("qwen3_8b", [0]), ("qwen2_5_32b", [0]), ("qwen3_30b_a3b", [1, 0]), ("qwen3_235b_a22b", [15, 0, 1])]


@pytest.mark.long
@pytest.mark.parametrize(("name", "stages"), CASES)
def test_all_kinds_of_ranks_and_engines_run(name, stages, tmp_path):
    found = rehearse_shipped(name, tmp_path)
    assert [rank["stage"] for rank in found["trainer"]] == stages and len(found["engine"]) == 2
    for rank in found["trainer"]:
        check_aims(rank)
        waits = [wait["in_micro_batches"] for phase in rank["phases"] for wait in phase["host_waits"]]
        assert stages != [0] or not any(waits), "a dense model's host waits for nothing within micro-batches"
