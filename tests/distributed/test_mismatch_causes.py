"""The mismatch by cause: each planted cause appears only under its own name, and the causes add up to the total."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support import training_runs
from support.models import FP8, FP32, random_sequences
from support.trainer import Trainer

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.diagnosis.attribution import CAUSES, MismatchAttribution
from megatron_rl.mcore.engine_emulation import emulate_cache, emulate_engine

SUMMED = ("mean", "k3")
ROLLOUT = {mode: {"mode": mode, "high": "fp32"} for mode in ("fp8_rollout", "int8_rollout")}
CHANGED = "linear_fc1.weight"


def measure_causes(folder, precision, batch, fault=""):
    """Return the metrics of the mismatch attribution.

    Args:
        fault: the engine computes slightly different log-probs ("kernels"), scales its inputs in the other format ("activations"), holds a
            first scale that is twice as large ("weights") or caches in E4M3 ("kv"), or an optimizer step follows ("version").
    """
    trainer = Trainer(folder, precision)
    actor, named_tensors, format = trainer.actor, trainer.collect_named_tensors(), trainer.contract.engine_format
    if fault == "activations":
        format = replace(format, scale_format={"pow2": "fp32", "fp32": "pow2"}[format.scale_format])
    if fault == "weights":
        name = next(name for name in named_tensors if f"{CHANGED}_scale" in name)
        named_tensors[name] = named_tensors[name].clone()
        named_tensors[name].view(-1)[0] *= 2
    cached = emulate_cache(actor.model) if fault == "kv" else nullcontext()
    with cached, emulate_engine(actor.model, named_tensors, format):
        sampled = actor.compute_logprobs(batch)[0]
    for answer, engine, trainers in zip(batch, sampled, actor.compute_logprobs(batch)[0], strict=True):
        answer.rollout_logprobs = engine + 0.01 * torch.randn(engine.shape, generator=torch.Generator().manual_seed(0)) * (
            fault == "kernels"
        )
        answer.old_logprobs = trainers
    causes = MismatchAttribution(actor, lambda: named_tensors, format, fault == "kv")
    causes.measure(batch)
    if fault == "version":
        actor.update(batch, PolicyLoss(AlgorithmConfig()))
    return causes.finish()


def attributed(world, checkpoint, precision, fault=""):
    """Return the mean absolute mismatch by cause. Every rank gets the same, and the causes add up to the total."""
    metrics, *others = world.call(measure_causes, checkpoint, precision, random_sequences(8, 3), fault)
    assert all(other == metrics for other in others)
    for what in SUMMED:
        total = metrics[f"mismatch/cause/total/{what}"]
        assert sum(metrics[f"mismatch/cause/{cause}/{what}"] for cause in CAUSES) == pytest.approx(total, abs=1e-12)
    return {cause: metrics[f"mismatch/cause/{cause}/abs_mean"] for cause in (*CAUSES, "total")}


@pytest.mark.parametrize("fault, scale_format", [*((cause, "pow2") for cause in CAUSES), ("activations", "fp32")])
def test_in_unified_fp8_a_planted_cause_is_found_in_its_rung(worlds, checkpoint, fault, scale_format):
    """All other causes are exactly 0: same bytes, same products, same order of sums."""
    shares = attributed(worlds(1), checkpoint, FP8 | {"scale_format": scale_format}, fault)
    assert {cause for cause in CAUSES if shares[cause]} == {fault}
    assert shares[fault] == shares["total"] > 1e-3


@pytest.mark.parametrize("precision", [FP8, FP32], ids=["fp8_unified", "bf16"])
def test_one_precision_flow_has_nothing_to_attribute(worlds, checkpoint, precision):
    for world in (worlds(1), worlds(2)):
        assert set(attributed(world, checkpoint, precision).values()) == {0.0}


@pytest.mark.parametrize("mode", ROLLOUT)
def test_a_quantized_engine_differs_by_its_weights_and_by_its_inputs(worlds, checkpoint, mode):
    for world in (worlds(1), worlds(2)):
        shares = attributed(world, checkpoint, ROLLOUT[mode])
        assert shares["kernels"] == shares["version"] == 0
        assert shares["activations"] > 1e-3 and shares["weights"] > 1e-3


def test_a_changed_weight_and_a_version_are_found_beside_the_quantization(worlds, checkpoint):
    plain = attributed(worlds(1), checkpoint, ROLLOUT["fp8_rollout"])
    weights, version = (attributed(worlds(1), checkpoint, ROLLOUT["fp8_rollout"], fault) for fault in ("weights", "version"))
    assert weights["weights"] > 1.2 * plain["weights"] and weights["version"] == weights["kernels"] == 0
    assert version["version"] > 1e-3 and [version[name] for name in CAUSES[:3]] == [plain[name] for name in CAUSES[:3]]


def test_the_cache_of_an_engine_that_alone_is_quantized_is_found_with_its_scales_per_layer(worlds, checkpoint):
    shares = attributed(worlds(1), checkpoint, ROLLOUT["fp8_rollout"] | {"kv": "e4m3_per_layer"}, "kv")
    assert shares["kernels"] == shares["version"] == 0 and shares["kv"] > 1e-4


def test_the_loop_attributes_every_so_many_steps(worlds, checkpoint):
    noise = 0.02
    result = worlds(1).call(training_runs.run_loop, checkpoint, FP8, {"updates_per_step": 2, "correction": "tis"}, 3, noise, 2)[0]
    rows = result["rows"]
    assert ["mismatch/cause/total/mean" in row for row in rows] == [False, False, True, False]
    causes = {cause: rows[2][f"mismatch/cause/{cause}/abs_mean"] for cause in CAUSES}
    assert causes["activations"] == causes["weights"] == 0 < causes["version"]
    assert causes["kernels"] == pytest.approx(rows[2]["mismatch/abs_mean"], rel=1e-6) and 0.3 * noise < causes["kernels"] < noise
    # of every eighth completion, after the last of both updates; the first row is that of the version before any
    assert ["update/abs_mean" in row for row in rows] == [False, True, True, True]
    assert causes["version"] / 3 < rows[2]["update/abs_mean"] < 3 * causes["version"] and rows[2]["precision/response"] > 0
