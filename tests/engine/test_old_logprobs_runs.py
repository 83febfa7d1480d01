"""Whole runs with and without the pass of the old log-probs: equal samples, rewards and weights, bit for bit."""

import json
from typing import Any

import pytest
import torch
from support.models import FP32, write_model
from support.train_command import TORCHRUN, finish, read_rows, train
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

COMMON = {
    "train.steps": 3, "train.learning_rate": 1e-3, "rollout.max_total_tokens": 4096, "algorithm.entropy_coef": 0.01,
    "checkpoint.every": 3,
}  # fmt: skip
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
    "latent attention": ("deepseek_v3", {"train.layout.tp": 2, "precision.mode": "fp8_unified"}, TORCHRUN),
    "expert parallel": ("qwen3_moe", {"train.layout.dp": 2, "train.layout.ep": 2, "precision.mode": "fp8_unified"}, TORCHRUN),
    "context parallel": ("qwen3", {"train.layout.cp": 2, "rollout.top_k": 20, "rollout.min_p": 0.05}, TORCHRUN),
}


def run_once(folder, case, which):
    """Return (rows, samples without their mismatch, tensors of the last checkpoint by name) of a run."""
    family, changes, launcher = RUNS[case]
    write_model(folder / "model", family, FP32, num_hidden_layers=2)
    done = finish(train(folder, {**COMMON, **changes, "algorithm.old_logprobs": which}, launcher=launcher))
    assert done.code == 0, done.err
    run = (folder / "runs" / "latest").resolve()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name != "mismatch"} for row in samples]
    reader, tensors = FileSystemReader(next(run.rglob(".metadata")).parent), dict[str, Any]()
    _load_state_dict(tensors, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    weights = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return read_rows(run), kept, weights


@pytest.mark.parametrize("case", [case if case == "dense" else pytest.param(case, marks=pytest.mark.long) for case in RUNS])
def test_a_run_is_the_same_with_and_without_the_pass(case, tmp_path):
    (whole, samples, weights), (left_out, others, other_weights) = (run_once(tmp_path / which, case, which) for which in ("pass", "auto"))
    assert samples == others
    assert weights and weights.keys() == other_weights.keys()
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, other_weights[name])] == []
    for one, other in zip(whole[1:], left_out[1:], strict=True):
        assert one["reward/mean"] == other["reward/mean"] and one["grad_norm"] == other["grad_norm"]
        assert one.get("mismatch/abs_max", 0) == other.get("mismatch/abs_max", 0) == 0  # a step of stale tokens may ask the canary
