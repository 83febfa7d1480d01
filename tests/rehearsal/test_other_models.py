"""Model families and layouts beyond the shipped configurations agree with the plan, and planted faults are found."""

import json
from pathlib import Path

import pytest
from support.shipped import run_module

pytestmark = pytest.mark.long

PLAIN = (
    *("llama", "llama, bf16, recomputed", "recomputed", "experts", "experts, deep_gemm", "experts, bf16", "experts, blackwell"),
    *("experts, recomputed", "experts, cut", "experts alone", "experts, adapters"),
    *("context parallel", "pipeline", "virtual stages", "disaggregated"),
    *("critic, stages", "adapters", "glm", "glm, mtp", "glm, mtp, stages", "glm, mtp, recomputed"),
    *("deepseek, mtp", "deepseek, fp8, mtp", "deepseek, fp8, deep_gemm"),
)
BY_TREE = ("experts, by the tree", "experts, recomputed, by the tree", "experts, cut, by the tree", "experts, cut, adapters, by the tree")
LONG = ("critic", "critic, disaggregated", "critic, experts, bf16", "a teacher")
PLANTED = {
    "experts: host_tensor_in_loss": "cuda:0 and cpu",
    "experts: gather_in_wrong_group": "RefusedCollectiveError",
    "experts: tokens_among_replicas": "all-to-all in edp 2: megatron_rl/mcore/layers/moe/experts.py Dispatcher.token_dispatch",
    "experts: tokens_among_parts_of_experts": "all-to-all in etp 2: megatron_rl/mcore/layers/moe/experts.py Dispatcher.token_dispatch",
    "experts: backward_among_experts_ranks": "reduce-scatter in ep 2: megatron_rl/mcore/layers/linear/output_layer.py OutputLayer.forward",
    "experts: experts_among_replicas": "_ParamAndGradBucketGroup.start_grad_sync exchanges in edp alone",
    "context_in_tensor_ranks": "all-to-all in tp 2: megatron_rl/mcore/passes/context_parallel.py",
    "experts: refused_scales": "RefusedKernelError",
    "experts: item_per_layer": "",
    "experts: doubled_activation": "",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return rehearse(tmp_path_factory.mktemp("rehearsal"), *PLAIN, *PLANTED, *BY_TREE)


def rehearse(folder: Path, *cases: str) -> dict:
    """Return the ranks' reports by case."""
    return json.loads(run_module("support.rehearsals", str(folder), *cases).splitlines()[-1])


@pytest.mark.parametrize("case", PLAIN)
def test_it_runs_takes_the_memory_that_the_plan_says_and_waits_in_no_layer(reports, case):
    for rank in reports[case]:
        assert not rank["fault"] and not rank["waits_per_layer"]
        planned = {phase["phase"]: phase["planned_bytes"] / phase["peak_bytes"] for phase in rank["phases"] if phase["planned_bytes"]}
        phases = {"sync", "checkpoint", "logprobs 2", "update 2", "resume"} | ({"critic 2"} if "critic" in case else set())
        assert planned.keys() == phases and rank["passes"], planned
        check_save(rank, case)


def check_save(rank: dict, case: str) -> None:
    save = next(phase for phase in rank["phases"] if phase["phase"] == "checkpoint")
    if "disaggregated" not in case:
        assert save["planned_bytes"] == pytest.approx(save["held_bytes"], rel=0.01), "nothing is left of an update"
    assert save["peak_bytes"] - save["held_bytes"] <= 8 << 20, "masters pass through the device in pieces"


@pytest.mark.parametrize("case", BY_TREE)
def test_sums_of_experts_by_the_tree_take_the_memory_that_the_plan_says(reports, case):
    """Sums by tree make the host wait in every layer."""
    (rank,) = reports[case]
    assert not rank["fault"] and rank["waits_per_layer"]
    for phase in (phase for phase in rank["phases"] if phase["planned_bytes"]):
        assert phase["planned_bytes"] == pytest.approx(phase["peak_bytes"], rel=0.05), phase["phase"]
    check_save(rank, case)


def test_further_critics_and_a_teacher(tmp_path):
    found = rehearse(tmp_path, *LONG)
    for case in LONG:
        test_it_runs_takes_the_memory_that_the_plan_says_and_waits_in_no_layer(found, case)


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found_elsewhere(reports, case):
    (rank,) = reports[case]
    assert not rank["passes"] and PLANTED[case] in rank["fault"] and bool(rank["fault"]) == bool(PLANTED[case])
    assert bool(rank["waits_per_layer"]) == ("item_per_layer" in case)
    if "doubled" in case:
        update = next(phase for phase in rank["phases"] if phase["phase"] == "update 2")
        assert update["planned_bytes"] / update["peak_bytes"] < 0.95
