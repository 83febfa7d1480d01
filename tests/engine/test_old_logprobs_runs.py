"""Whole runs with and without the pass of the old log-probs: equal samples, rewards and weights, bit for bit."""

import json
import os
from typing import Any

import planted_server
import pytest
import torch
from support.models import FP32, write_model
from support.processes import ROOT
from support.train_command import TORCHRUN, finish, latest, read_json, read_rows, train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

COMMON = {
    "train.steps": 3, "train.learning_rate": 1e-3, "rollout.max_total_tokens": 4096, "algorithm.entropy_coef": 0.01,
    "checkpoint.every": 3, "reward.function": "support.agent_programs:judge",
}  # fmt: skip
BF16 = {"precision.mode": "bf16"}
AHEAD = {"placement.kind": "disaggregated", "placement.max_staleness": 1, "algorithm.old_policy": "engine"}
RUNS = {
    "dense": ("qwen3", {"algorithm.kl_coef": 0.01}, ()),
    "experts in FP8, two ranks": (
        "qwen3_moe",
        {"train.layout.tp": 2, "precision.mode": "fp8_unified", "algorithm.updates_per_step": 2},
        TORCHRUN,
    ),
    "filters": ("llama", {"rollout.top_p": 0.9, "rollout.top_k": 100, "rollout.temperature": 0.7}, ()),
    "sampling ahead": ("qwen2", AHEAD, ()),
    "pipeline": ("qwen3", {"train.layout.pp": 2}, TORCHRUN),
    "replicas": ("qwen3", {"train.layout.dp": 2, "algorithm.updates_per_step": 2}, TORCHRUN),
    "adapters": ("qwen3", {"lora.rank": 8, "train.learning_rate": 1e-2}, ()),
    "hybrid": ("qwen3_5_text", {}, ()),
    "hybrid in FP8, two stages": ("qwen3_5_text", {"train.layout.pp": 2, "precision.mode": "fp8_unified"}, TORCHRUN),
    "latent attention": ("deepseek_v3", {"algorithm.updates_per_step": 1}, ()),
    "sinks, and KL in the reward": ("gpt_oss", BF16 | {"algorithm.kl_in": "reward", "algorithm.advantage": "group_mean"}, ()),
    "expert parallel": ("qwen3_moe", {"train.layout.dp": 2, "train.layout.ep": 2, "precision.mode": "fp8_unified"}, TORCHRUN),
    "context parallel": ("qwen3", {"train.layout.cp": 2, "rollout.top_k": 20, "rollout.min_p": 0.05}, TORCHRUN),
    "context parallel, latent attention": ("deepseek_v3", {"train.layout.cp": 2, "precision.mode": "fp8_unified"}, TORCHRUN),
    "top-p among experts": ("qwen3_moe", {"rollout.top_p": 0.8, "rollout.top_k": 64, "precision.mode": "fp8_unified"}, ()),
    "samples that begin alike": ("mistral", {"rollout.temperature": 0.3, "precision.mode": "fp8_unified"}, ()),
    "one group of latent experts": ("glm4_moe_lite", {"precision.mode": "fp8_unified", "rollout.top_k": 50}, ()),
    "adapters of two ranks": ("qwen3", {"lora.rank": 8, "train.learning_rate": 1e-2, "train.layout.tp": 2}, TORCHRUN),
    "resumed": ("qwen3", {"checkpoint.every": 2, "checkpoint.resume": "auto", "train.steps": 4}, ()),
}


def run_once(folder, case, which):
    """Return (rows, samples without their mismatch, tensors of the last checkpoint by name) of a run."""
    family, changes, launcher = RUNS[case]
    write_model(folder / "model", family, FP32, num_hidden_layers=2)
    for steps in (2, 4) if case == "resumed" else (changes.get("train.steps", 3),):
        settings = {**COMMON, **changes, "algorithm.old_logprobs": which, "train.steps": steps}
        done = finish(train(folder, settings, launcher=launcher))
        assert done.code == 0, done.err
    run = (folder / "runs" / "latest").resolve()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name != "mismatch"} for row in samples]
    reader, tensors = FileSystemReader(max(run.rglob(".metadata")).parent), dict[str, Any]()
    _load_state_dict(tensors, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    weights = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return read_rows(run), kept, weights


@pytest.fixture(autouse=True)
def reward_function(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))


@pytest.mark.long  # tests/distributed/test_old_logprobs.py compares passes by default
@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_the_same_with_and_without_the_pass(case, tmp_path):
    (whole, samples, weights), (left_out, others, other_weights) = (run_once(tmp_path / which, case, which) for which in ("pass", "auto"))
    assert samples == others
    assert weights and weights.keys() == other_weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, other_weights[name])] == []
    for one, other in zip(whole[1:], left_out[1:], strict=True):
        assert one["reward/mean"] == other["reward/mean"] and one["grad_norm"] == other["grad_norm"]
        assert one.get("mismatch/abs_max", 0) == other.get("mismatch/abs_max", 0) == 0  # a step of stale tokens may ask the canary
        assert one["reward/mean"] > 0, "advantages of 0 would test no ratio"


@pytest.mark.long
@pytest.mark.parametrize("which", ["pass", "auto"])
def test_an_engine_whose_weight_changes_is_found_in_the_first_step(which, tmp_path, monkeypatch):
    fault = tmp_path / "fault"
    monkeypatch.setenv(planted_server.FILE_VARIABLE, str(fault))
    planted_server.set_fault(fault, "changed weight")
    changes = {"algorithm.old_logprobs": which, "algorithm.updates_per_step": 1, "rollout.max_new_tokens": 24, "data.eval_every": 1000}
    done = finish(train(tmp_path, changes | {"data.eval_size": 1}, module="planted_run"))
    assert done.code == 3, done.err
    assert [row["step"] for row in read_rows(latest(tmp_path))] == [0]
    assert read_json(latest(tmp_path) / "run.json")["reason"].startswith("the mismatch of rollout and trainer is")


@pytest.mark.long
def test_the_engines_logprobs_are_the_old_ones_of_a_run_that_promises_nothing_if_asked_for(tmp_path):
    """Only the engine is quantized. Every step compares, and the ratio of the first update covers the mismatch."""
    changes = COMMON | {"precision.mode": "fp8_rollout", "algorithm.updates_per_step": 1}
    write_model(tmp_path / "model", "qwen3", FP32)
    rows = {}
    for which in ("engine", "pass", "auto"):
        done = finish(train(tmp_path, changes | {"algorithm.old_logprobs": which, "log.dir": tmp_path / which}))
        assert done.code == 0, done.err
        rows[which] = read_rows(tmp_path / which / "latest")[1:]
    assert all(row["mismatch/abs_max"] > 0 and row["mismatch/tokens"] > 0 for part in rows.values() for row in part)
    first = {which: part[0] for which, part in rows.items()}
    for name in ("reward/mean", "mismatch/abs_max", "mismatch/tokens", "entropy"):
        assert first["engine"][name] == pytest.approx(first["pass"][name], rel=1e-6), name
    assert first["auto"]["grad_norm"] == first["pass"]["grad_norm"] != first["engine"]["grad_norm"]
