"""Shortened runs of `megatron-rl train` prove every tensor: a sync by CUDA IPC into a live engine; the quickstart in `fp8_unified`."""

import json

import pytest
import torch
from support.processes import Command
from support.train_command import make_model

from megatron_rl.config import load_config
from megatron_rl.kernels.linear import requirements
from megatron_rl.preflight import check_run
from megatron_rl.rollout import engine_packages

RUNS = {
    "sync by CUDA IPC": {  # three policy versions
        "architecture.hidden_size": 1024,
        "architecture.intermediate_size": 3072,
        "architecture.num_hidden_layers": 4,
        "architecture.num_attention_heads": 8,
        "warm_start.steps": 0,
        "train.steps": 2,
        "data.eval_size": 16,
    },
    "quickstart in fp8_unified": {"precision.mode": "fp8_unified", "warm_start.steps": 150, "train.steps": 5},
    "quickstart with sums by the tree": {
        "precision.mode": "fp8_unified",
        "precision.reduction": "tree",
        "warm_start.steps": 0,
        "train.steps": 2,
    },
}


def make_settings(name, folder, backend):
    settings = {"precision.high": "bf16", "precision.reduction": "fast", "sync.transport": "cuda_ipc", "rollout.start_timeout": 280.0}
    return settings | RUNS[name] | {"precision.backend": backend, "model.path": folder / "model", "log.dir": folder / "runs"}


def train(name, folder, seconds=100, **changes):
    """Run it for at most `seconds` and return its folder and back end: for the quickstart the first one that a run accepts here."""
    backends = ("deep_gemm", "transformer_engine") if "quickstart" in name else ()
    backend = next((name for name in backends if not requirements.find_missing(name)), "emulated")
    arguments = make_model(folder, make_settings(name, folder, backend) | changes)
    with Command(folder / "console", "megatron_rl", "train", *arguments) as command:
        done = command.wait(seconds)
    run = folder / "runs" / "latest"
    logs = "".join(f"--- {log.name}\n{log.read_text()[-3000:]}\n" for log in run.glob("*.log"))
    assert done.code == 0, done.err + logs
    return run, backend


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_a_run_proves_every_tensor_it_syncs(name, tmp_path, record_property):
    run, backend = train(name, tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 1 + RUNS[name]["train.steps"]
    for row in rows:
        reported = ("sync/proved", "sync/bytes", "time/sync", "time/proof", "time/step", "mismatch/abs_mean", "mismatch/abs_max")
        record_property(f"{name}, {backend}, step {row['step']}", {metric: row[metric] for metric in reported if metric in row})
        assert 0 < row["sync/proved"] == row["sync/tensors"]


@pytest.mark.parametrize("name", RUNS)
def test_settings_of_the_runs_are_accepted(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # all that transport and engines ask before a run
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(engine_packages, "check", lambda *_: None)
    monkeypatch.setattr(requirements, "find_triton_problem", lambda: None)
    config, *options = make_model(tmp_path, {**make_settings(name, tmp_path, "emulated"), "warm_start.steps": 0})
    assert check_run(load_config(config, options)).world_size == 1
