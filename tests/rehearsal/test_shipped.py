"""The shipped configurations, and a dense one with four stages, run without GPUs and take the planned memory.

The default tests rehearse the 8B with its engines and the last rank of others, the long tests all kinds of ranks and all engines.
"""

import pytest
from support.shipped import check_aims, rehearse_shipped, rehearse_trainers

STAGES = "--train.layout.pp=4,--train.layout.last_stage_layers=13,--train.layout.dp=1"
COUNTS = "megatron_rl/mcore/layers/moe/token_counts.py"
LAYERS = {"qwen2_5_32b": 0, "qwen3_30b_a3b": 22, "qwen3_235b_a22b": 4}
"""Number of layers with experts on the last stage."""
EXCHANGES = {"qwen2_5_32b": set(), "qwen3_30b_a3b": {"ep 8"}, "qwen3_235b_a22b": {"ep 8", "tp 8"}}
"""Groups of all-to-alls: tokens of experts, and heads if ranks share a key-value head."""


@pytest.fixture(scope="module")
def last_ranks():
    return rehearse_trainers(f"qwen2_5_32b,h100,last,{STAGES}", "qwen3_30b_a3b,h100,last", "qwen3_235b_a22b,h100,last")


@pytest.mark.parametrize("name", LAYERS)
def test_the_last_rank_runs_and_waits_once_a_layer_for_what_experts_get(last_ranks, name):
    (rank,) = last_ranks[name]
    assert rank["passes"] and not rank["fault"], rank["fault"]
    check_aims(rank)
    for phase in rank["phases"]:
        within = {wait["line"]: wait["in_micro_batches"] for wait in phase["host_waits"] if wait["in_micro_batches"]}
        assert all(line.startswith(COUNTS) for line in within), phase["phase"]
        assert sum(within.values()) == LAYERS[name] * phase["micro_batches"], phase["phase"]
    update = next(phase for phase in rank["phases"] if phase["phase"] == "update 2")
    assert {entry["group"] for entry in update["collectives"] if entry["kind"] == "all-to-all"} == EXCHANGES[name]


LONG = [("qwen2_5_32b", [0]), ("qwen3_30b_a3b", [1, 0]), ("qwen3_235b_a22b", [15, 0, 1])]


@pytest.mark.parametrize(("name", "stages"), [("qwen3_8b", [0]), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_all_kinds_of_ranks_and_engines_run(name, stages, tmp_path):
    found = rehearse_shipped(name, tmp_path)
    assert [rank["stage"] for rank in found["trainer"]] == stages and len(found["engine"]) == 2
    for rank in found["trainer"]:
        check_aims(rank)
        waits = [wait["in_micro_batches"] for phase in rank["phases"] for wait in phase["host_waits"]]
        assert stages != [0] or not any(waits), "a dense model's host waits for nothing within micro-batches"
