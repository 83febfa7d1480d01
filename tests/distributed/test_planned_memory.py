"""The planner's bytes match those of real Megatron models: lasting memory exactly, a layer's activations closely, the peak within 5 %."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from support import megatron_models
from support.families import ARCHITECTURES, cut_everything
from support.models import FP8, make_model, random_sequences

from megatron_rl.config import Config
from megatron_rl.cost import activations, operators, weights
from megatron_rl.cost.workload import Candidate, Workload
from parallel.families import FAMILIES
from parallel.layout import Layout

UNIFIED, BF16 = {"mode": "fp8_unified", "high": "bf16"}, {"mode": "bf16", "high": "bf16"}
HELD = [
    *((name, cut_everything(name), UNIFIED) for name in FAMILIES),
    ("qwen3", Layout(pp=2, vpp=2, dp=2), UNIFIED | {"high": "fp32"}),
    ("qwen3", Layout(tp=2, dp=2), UNIFIED),
    ("qwen2", Layout(tp=2, pp=2), BF16),  # tied: the last stage has an embedding of its own
    ("qwen3_moe", Layout(tp=2, ep=2, etp=1, dp=2), BF16),
]
LORA = {"rank": 8}


def job_of(name: str, precision: dict[str, str], **sections: object) -> Workload:
    short = {"data": {"max_prompt_tokens": 100}, "rollout": {"max_new_tokens": 100}}
    config = Config.model_validate_json(json.dumps({"model": {"path": "x"}, "precision": precision, **short, **sections}))
    return Workload.from_config(config, ARCHITECTURES[name])


@pytest.mark.parametrize("name, layout, precision", HELD, ids=[f"{name}-{layout}" for name, layout, _ in HELD])
def test_what_every_rank_holds(worlds, tmp_path, name, layout, precision):
    folder = make_model(tmp_path / name, ARCHITECTURES[name])
    check_bytes(worlds(4).call(megatron_models.count_bytes, folder, precision, layout, None), job_of(name, precision), layout)


def test_what_every_rank_holds_with_adapters(worlds, tmp_path):
    folder, layout = make_model(tmp_path / "model", ARCHITECTURES["qwen3_moe"]), Layout(tp=2, ep=2, etp=1, dp=2)
    job = job_of("qwen3_moe", UNIFIED, lora=LORA)
    check_bytes(worlds(4).call(megatron_models.count_bytes, folder, UNIFIED, layout, job.config.lora), job, layout)


def check_bytes(ranks: list[dict[str, int]], job: Workload, layout: Layout) -> None:
    planned = [weights.count_trainer_memory(job, layout, layout.coordinates(rank).pp)._asdict() for rank in range(4)]
    for rank, (measured, expected) in enumerate(zip(ranks, planned, strict=True)):
        for part in ("gradients", "masters", "moments"):  # Megatron pads buffers, and cuts them anywhere
            assert measured.pop(part) == pytest.approx(expected[part], rel=2e-3), (rank, part)
        assert measured.items() <= expected.items(), rank


@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)])
def test_what_a_value_of_a_quantized_weight_occupies_and_moves(worlds, checkpoint, dp):
    """A rank holds data and scales, the gradient, and its share of master and moments, and nothing else. The gather moves bytes."""
    ranks = worlds(dp).call(megatron_models.count_live_bytes, checkpoint, FP8, Layout(dp=dp), random_sequences(2 * dp, seed=1))
    for rank, measured in enumerate(ranks):
        assert measured["reference"] == pytest.approx(1 + 4 / 128**2, rel=0.02), rank  # and 12 KB of buffers beside a million weights
        assert measured["live"] == pytest.approx(1 + 4 / 128**2 + 4 + 12 / dp, rel=5e-3), rank
        assert measured["gathered"] == pytest.approx(1, rel=1e-3), rank


SAVED = [
    # an expert of few tokens is padded on a CPU
    *((name, replace(cut_everything(name), pp=1), UNIFIED, 0.04 if job_of(name, UNIFIED).model.experts else 0.002) for name in FAMILIES),
    ("qwen3", Layout(tp=2), UNIFIED | {"high": "fp32"}, 0.001),
    ("qwen2", Layout(tp=2), BF16, 0.002),
]


@pytest.mark.parametrize(
    "name, layout, precision, tolerance", SAVED, ids=[f"{name}-{how['mode']}-{how['high']}" for name, _, how, _ in SAVED]
)
def test_what_a_layer_keeps_for_the_backward_pass(worlds, tmp_path, name, layout, precision, tolerance):
    lengths = [96, 64, 96]
    folder = make_model(tmp_path / name, ARCHITECTURES[name])
    ranks = worlds(2).call(megatron_models.count_saved_bytes, folder, precision, layout, lengths)
    job = job_of(name, precision)
    inputs = operators.RankShapes(job, layout, sum(lengths), cpu=True)
    for layer, measured in enumerate(zip(*ranks, strict=True)):
        expected = activations.count_layer_activations(inputs, job.model.has_experts(layer))
        assert sum(measured) / len(ranks) == pytest.approx(expected, rel=tolerance), layer


PEAKS = [
    ("qwen3_moe", UNIFIED, "full"),
    *(pytest.param("qwen3", UNIFIED, recompute, marks=pytest.mark.long) for recompute in ("full", "selective")),
    *(pytest.param(name, UNIFIED, "none", marks=pytest.mark.long) for name in FAMILIES),
    pytest.param("qwen3", BF16, "none", marks=pytest.mark.long),
]


@pytest.mark.parametrize("name, precision, recompute", PEAKS)
def test_the_peak_of_a_training_pass(worlds, tmp_path, monkeypatch, name, precision, recompute):
    lengths = [256] * 4
    folder = make_model(tmp_path / name, ARCHITECTURES[name])
    (measured,) = worlds(1).call(megatron_models.measure_peak, folder, precision, Layout(), lengths, recompute)
    job = job_of(name, precision)
    monkeypatch.setattr(activations, "RankShapes", partial(operators.RankShapes, cpu=True))
    monkeypatch.setattr(Workload, "tokens_per_rank", lambda *_: sum(lengths))
    planned = activations.count_training_activations(job, Candidate(Layout(), recompute=recompute), 0)
    assert planned.kept + planned.working == pytest.approx(measured, rel=0.05)
