"""The rehearsal of a tiny model agrees with the plan and finds planted faults."""

from __future__ import annotations

import json

import pytest
from support import driver_bound
from support.shipped import run_module

CASES = ("plain", "host_tensor_in_loss", "item_per_layer", "doubled_activation", "gather_in_wrong_group", "refused_scales")
CASES += ("module_without_a_share", "part_at_another_place", "gather_among_context_ranks")
CASES += ("sum_from_unknown_line", "replay", "replay: routes_counted_in_passes")

PLANNED = ["sync", "checkpoint", "logprobs 2", "update 2", "resume"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The first rank's report by case, with packages installed that need a driver."""
    path = driver_bound.install(tmp_path_factory.mktemp("packages"))
    found = run_module("support.rehearsals", str(tmp_path_factory.mktemp("rehearsal")), *CASES, path=path)
    return {case: ranks[0] for case, ranks in json.loads(found.splitlines()[-1]).items()}


def phase_of(report, name):
    return next(phase for phase in report["phases"] if phase["phase"] == name)


def test_the_tiny_model_runs_and_takes_the_memory_that_the_plan_says(reports):
    plain = reports["plain"]
    assert not plain["fault"] and plain["passes"]
    names = ["build", "logprobs", "update 1", "off-load", "sync", "checkpoint", "restore", "logprobs 2", "update 2", "resume"]
    assert [phase["phase"] for phase in plain["phases"]] == names
    assert [phase["phase"] for phase in plain["phases"] if phase["planned_bytes"]] == PLANNED
    assert phase_of(plain, "update 2")["peak_bytes"] > phase_of(plain, "update 1")["peak_bytes"]  # Adam's moments


def test_collectives_are_counted_by_kind_and_group(reports):
    collectives = phase_of(reports["plain"], "update 2")["collectives"]
    gathered = [entry for entry in collectives if entry["line"].startswith("megatron_rl/kernels/linear/gather.py")]
    assert {(entry["kind"], entry["group"]) for entry in gathered} == {("all-gather", "tp 2")}
    layers, micro_batches, activation = 2, 2, 4096 * 1024 * 33 // 32  # bytes, and four for the scale of 128 of them
    assert sum(entry["bytes"] for entry in gathered) % (layers * micro_batches * activation) == 0
    assert any(entry["group"] == "dp*cp 2" and entry["kind"] == "reduce-scatter" for entry in collectives)


def test_a_host_tensor_in_the_loss_is_a_fault_with_its_line(reports):
    fault = reports["host_tensor_in_loss"]["fault"]
    assert "cuda:0 and cpu" in fault and "in phase update 1 at megatron_rl/mcore/actor.py" in fault


def test_a_wait_in_every_layer_is_named(reports):
    report = reports["item_per_layer"]
    assert not report["passes"] and not report["fault"] and not reports["plain"]["waits_per_layer"]
    waits = [entry for entry in phase_of(reports["plain"], "update 2")["host_waits"] if "step_response" in entry["line"]]
    assert [entry["count"] for entry in waits] == [1], "the host knows what of a sampled weight it holds"
    assert list(report["waits_per_layer"].values()) == [1] and "(item)" in next(iter(report["waits_per_layer"]))


def test_no_layer_waits_whose_experts_a_record_names(reports):
    replayed, counted = reports["replay"], reports["replay: routes_counted_in_passes"]
    assert not replayed["fault"] and not replayed["waits_per_layer"]
    for name in ("logprobs 2", "update 2"):
        assert not sum(wait["in_micro_batches"] for wait in phase_of(replayed, name)["host_waits"])
    (line,) = counted["waits_per_layer"]
    assert line.startswith("megatron_rl/mcore/layers/moe/token_counts.py")


def test_a_doubled_activation_is_not_as_planned(reports):
    report = reports["doubled_activation"]
    phase = phase_of(report, "update 2")
    assert not report["passes"] and not report["fault"]
    assert phase["planned_bytes"] / phase["peak_bytes"] < 0.95


def test_a_gather_in_the_wrong_group_of_the_same_size_is_refused(reports):
    fault = reports["gather_in_wrong_group"]["fault"]
    assert "RefusedCollectiveError" in fault and "dp 2" in fault and "kernels/linear/gather.py" in fault


def test_a_gather_among_as_many_context_parallel_ranks_is_refused(reports):
    fault = reports["gather_among_context_ranks"]["fault"]
    caller = "megatron_rl/mcore/layers/attention/self_attention.py PackedSelfAttention.get_query_key_value_tensors"
    assert "RefusedCollectiveError in phase logprobs at megatron_rl/kernels/linear/gather.py:" in fault
    assert fault.endswith(f"all-gather in cp 2: {caller} exchanges in tp alone")


def test_a_collective_of_a_line_that_is_not_in_the_table_is_refused(reports):
    fault = reports["sum_from_unknown_line"]["fault"]
    assert "all-reduce in tp 2: megatron_rl/mcore/actor.py Actor._accumulate_gradients" in fault and "is not in the table" in fault


def test_a_shape_that_deep_gemm_refuses_is_a_fault(reports):
    fault = reports["refused_scales"]["fault"]
    assert "deep_gemm.fp8_gemm_nt: scales are [15, 8]" in fault and "kernels/linear/deep_gemm.py" in fault


def test_a_save_tells_what_it_writes_and_holds_on_the_host(reports):
    save, load = (phase_of(reports["plain"], name) for name in ("checkpoint", "resume"))
    assert 0 < save["written_bytes"] <= save["host_peak_bytes"] and not load["written_bytes"]
    assert save["peak_bytes"] - save["held_bytes"] < 1 << 20, "masters wait on the host, and pass through the device in parts"


def test_a_module_that_knows_no_share_of_a_checkpoint_is_a_fault(reports):
    fault = reports["module_without_a_share"]["fault"]
    assert "in phase checkpoint" in fault and "sharded_state_dict" in fault


def test_a_weight_that_would_be_saved_at_another_place_is_a_fault(reports):
    fault = reports["part_at_another_place"]["fault"]
    assert "MisplacedPartError in phase checkpoint" in fault and "linear_proj.weight" in fault
