"""SGLang's model on Hopper has the tensors that a sync fills, and a model class that lacks some is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import driver_bound

from megatron_rl.config import Config
from megatron_rl.config.loading import load_config
from megatron_rl.cost.hardware import GPUS
from megatron_rl.cost.weights import count_engine_weights
from megatron_rl.cost.workload import Workload
from megatron_rl.hf.files import read_config
from megatron_rl.rehearsal.engine_rank import EngineRankReport, rehearse_engine

CONFIGS = Path(__file__).parents[3] / "configs"


def rehearse(config: Config) -> list[EngineRankReport]:
    planned = count_engine_weights(Workload.from_config(config, read_config(config.model.folder)), config.rollout.tp, config.rollout.ep)
    return rehearse_engine(config, planned, GPUS["h100"])


def few_layers(model: str, folder: Path, **changes: object) -> Path:
    fields = json.loads((CONFIGS / "models" / model / "config.json").read_text()) | {"num_hidden_layers": 2} | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.long
def test_experts_on_hopper_hold_what_a_sync_fills(tmp_path, tmp_path_factory, monkeypatch):
    """With packages installed that need a driver."""
    monkeypatch.setenv("PYTHONPATH", driver_bound.install(tmp_path_factory.mktemp("packages")))
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


@pytest.mark.long
def test_a_class_without_some_weights_is_named(tmp_path):
    model = few_layers("Qwen3-8B", tmp_path, architectures=["Qwen2ForCausalLM"])  # which has no norms of queries and keys
    fault = rehearse(load_config(CONFIGS / "qwen3_8b.toml", [f"--model.path={model}"]))[0].fault
    assert "engine rank 0: model.layers.0.self_attn" in fault and "absent" in fault
