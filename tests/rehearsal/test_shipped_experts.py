"""The shipped configurations of mixtures of experts run on GPUs that are not there, and take the memory that `plan` says."""

from __future__ import annotations

import pytest
from support.shipped import rehearse_shipped

DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"


@pytest.mark.long  # minutes each
@pytest.mark.parametrize(("name", "layers", "options"), [("qwen3_30b_a3b", 24, ()), ("qwen3_235b_a22b", 47, ("--gpu", "h200"))])
def test_the_last_rank_runs_and_waits_once_a_layer_for_what_experts_get(name, layers, options, tmp_path):
    (rank,) = rehearse_shipped(name, tmp_path, "--ranks", "last", *options)["trainer"]
    for phase in rank["phases"]:
        within = {wait["line"]: wait["in_micro_batches"] for wait in phase["host_waits"] if wait["in_micro_batches"]}
        assert all(line.startswith(DISPATCHER) for line in within), phase["phase"]
        assert sum(within.values()) == layers * phase["micro_batches"], phase["phase"]
    update = next(phase for phase in rank["phases"] if phase["phase"] == "update 2")
    groups = {entry["group"] for entry in update["collectives"] if entry["kind"] == "all-to-all"}
    assert groups == ({"ep 8"} if layers == 24 else {"ep 64", "tp 8"}), "tokens; and heads, where ranks share a key-value head"
