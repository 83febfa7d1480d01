"""The rehearsal of a tiny model agrees with the plan and finds planted faults, and so does that of SGLang's model on Hopper."""

import json
from pathlib import Path

import pytest
from support.shipped import few_layers, run_module

from megatron_rl.config import Config
from megatron_rl.config.loading import load_config
from megatron_rl.cost.hardware import GPUS
from megatron_rl.cost.weights import count_engine_weights
from megatron_rl.cost.workload import Workload
from megatron_rl.hf.files import read_config
from megatron_rl.rehearsal.engine_rank import EngineRankReport, rehearse_engine

FAULTS = {
    "host_tensor_in_loss": ("cuda:0 and cpu", "in phase update 1 at megatron_rl/mcore/actor.py"),
    "gather_in_wrong_group": ("RefusedCollectiveError", "dp 2", "kernels/linear/gather.py"),
    "gather_among_context_ranks": (
        "RefusedCollectiveError in phase logprobs at megatron_rl/kernels/linear/gather.py:",
        "all-gather in cp 2: megatron_rl/mcore/layers/attention/self_attention.py PackedSelfAttention.get_query_key_value_tensors",
        "exchanges in tp alone",
    ),
    "sum_from_unknown_line": ("all-reduce in tp 2: megatron_rl/mcore/actor.py Actor._accumulate_gradients", "is not in the table"),
    "refused_scales": ("deep_gemm.fp8_gemm_nt: scales are [15, 8]", "kernels/linear/deep_gemm.py"),
    "module_without_a_share": ("in phase checkpoint", "sharded_state_dict"),
    "part_at_another_place": ("MisplacedPartError in phase checkpoint", "linear_proj.weight"),
}
CASES = (
    "plain",
    "ranks",
    "ranks, bf16",
    "ranks, splits",
    "item_per_layer",
    "doubled_activation",
    "replay",
    "replay: routes_counted_in_passes",
    *FAULTS,
)

PLANNED = ["sync", "checkpoint", "logprobs 2", "update 2", "resume"]


@pytest.fixture(scope="module")
def driver_bound(tmp_path_factory):
    """A path with fake GPU packages whose import loads the CUDA driver, and so raises OSError on a machine without one."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("flashinfer", "flash_mla", "sgl_kernel", "deep_gemm", "transformer_engine"):
        (folder / f"{name}.py").write_text('import ctypes\n\nctypes.CDLL("no-driver/libcuda.so.1")\n')
    return str(folder)


@pytest.fixture(scope="module")
def reports(tmp_path_factory, driver_bound):
    """The first rank's report by case."""
    found = run_module("support.rehearsals", str(tmp_path_factory.mktemp("rehearsal")), *CASES, path=driver_bound)
    return {case: ranks[0] for case, ranks in json.loads(found.splitlines()[-1]).items()}


def phase_of(report, name):
    return next(phase for phase in report["phases"] if phase["phase"] == name)


@pytest.mark.parametrize("case", ["ranks", "ranks, bf16", "ranks, splits"])
def test_the_kernels_that_the_engine_shares_accept_the_trainers_arguments(reports, case):
    assert not reports[case]["fault"] and reports[case]["passes"]
    assert {"fp8", "bf16"} & phase_of(reports[case], "update 2")["flops"].keys() == ({"bf16"} if case == "ranks, bf16" else {"fp8", "bf16"})


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


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_named_with_its_line(reports, case):
    assert all(words in reports[case]["fault"] for words in FAULTS[case]), reports[case]["fault"]


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


def test_a_save_tells_what_it_writes_and_holds_on_the_host(reports):
    save, load = (phase_of(reports["plain"], name) for name in ("checkpoint", "resume"))
    assert 0 < save["written_bytes"] <= save["host_peak_bytes"] and not load["written_bytes"]
    assert save["peak_bytes"] - save["held_bytes"] < 1 << 20, "masters wait on the host, and pass through the device in parts"


CONFIGS = Path(__file__).parents[3] / "configs"


def rehearse(config: Config) -> list[EngineRankReport]:
    planned = count_engine_weights(Workload.from_config(config, read_config(config.model.folder)), config.rollout.tp, config.rollout.ep)
    return rehearse_engine(config, planned, GPUS["h100"])


@pytest.mark.long
def test_experts_on_hopper_hold_what_a_sync_fills(tmp_path, driver_bound, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", driver_bound)
    overrides = [f"--model.path={few_layers('Qwen3-30B-A3B', tmp_path)}", "--train.layout.last_stage_layers=0"]
    config = load_config(CONFIGS / "qwen3_30b_a3b.toml", overrides)
    reports = rehearse(config)
    assert [report.rank for report in reports] == [0, config.rollout.tp - 1]
    assert {(report.model, report.fault, report.passes) for report in reports} == {("Qwen3MoeForCausalLM", "", True)}
    assert all(report.chunks for report in reports)
    first, last = reports
    assert last.forward is None and first.forward is not None and 0 < first.needed < first.workspace
    assert all(seconds > 0 for phase in first.forward["phases"] for seconds in phase["seconds"].values())
    assert {report.tensors for report in reports} == {2 * 13 + 3} and {report.bytes for report in reports} == {reports[0].planned}
