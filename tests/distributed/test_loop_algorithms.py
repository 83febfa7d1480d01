"""Every algorithm through the real loop and a real FP8 trainer: it learns what is rewarded, and reports its metrics."""

import math
from functools import partial

import pytest
from support import training_runs
from support.models import FP8

from megatron_rl.config.algorithm import PRESETS

STEPS = 3
LEARNED = ("grpo", "gspo", "rloo", "clip_cov")
"""By default: a loss of each kind, and an advantage of its own."""


def run(worlds, checkpoint, critic=None, noise=0.02, steps=STEPS, **algorithm):
    settings = {"updates_per_step": 2, **algorithm}
    call = partial(training_runs.run_loop, critic=critic or {})
    result = worlds(1).call(call, checkpoint, FP8, settings, steps, noise)[0]
    assert len(result["rows"]) == steps + 1 and all(math.isfinite(value) for row in result["rows"] for value in row.values())
    return result


@pytest.mark.parametrize(
    "name", [name if name in LEARNED else pytest.param(name, marks=pytest.mark.long) for name in PRESETS if name != "ppo"]
)
def test_an_algorithm_makes_rewarded_answers_likelier(worlds, checkpoint, name):
    """Adam's steps of 1e-3 move a random model by far more than 0.1 nats. A wrong sign would move it the other way."""
    result = run(worlds, checkpoint, name=name, kl_coef=0.001)
    assert result["leads"][-1] > result["leads"][0] + 0.1
    assert all((advantage > 0) == bool(number % 2) for number, advantage in enumerate(result["advantages"]))
    assert ("loss/kl" in result["rows"][-1]) == (name != "rloo") and ("reward/kl" in result["rows"][-1]) == (name == "rloo")


def test_a_critic_learns_returns_and_its_advantages_make_rewarded_answers_likelier(worlds, checkpoint):
    """The critic first trains alone, without changing the policy, then before each update of the policy."""
    result = run(worlds, checkpoint, {"learning_rate": 3e-3, "critic_warmup": 3}, steps=6, name="ppo", kl_coef=0.001, lam=0.95)
    first, *rows = result["rows"]
    leads = result["leads"]
    assert leads[0] == leads[1] == leads[2] == leads[3] and leads[-1] > leads[0] + 0.1
    assert ["grad_norm" in row for row in rows] == [False] * 3 + [True] * 3 and "critic/loss" not in first
    assert rows[0]["critic/values_mean"] == rows[0]["critic/explained_variance"] == 0
    assert rows[-1]["critic/explained_variance"] > 0.5 and rows[-1]["critic/loss"] < 0.5 * rows[0]["critic/loss"]
    assert all(row["critic/grad_norm"] > 0 and row["critic/returns_mean"] == pytest.approx(0.5, abs=0.2) for row in rows)


def test_an_environments_tokens_have_no_value(worlds, checkpoint):
    algorithm, critic = {"name": "ppo", "correction": "tis"}, {"learning_rate": 3e-3}
    call = partial(training_runs.run_loop, environment_logprob=-3.0, critic=critic)
    result = worlds(1).call(call, checkpoint, FP8, algorithm, 2, 0.02)[0]
    rows = result["rows"][1:]
    assert result["leads"][-1] > result["leads"][0] and all(row["correction/mean_positive"] > 0.9 for row in rows)


@pytest.mark.parametrize("correction", ["tis", "sequence_tis", "icepop", "geometric_mask"])
def test_corrections_are_reported(worlds, checkpoint, correction):
    row = run(worlds, checkpoint, correction=correction, correction_cap=1.01)["rows"][-1]
    touched = row["correction/touched_positive"] + row["correction/touched_negative"]
    assert 0.5 < row["correction/mean_positive"] <= row["correction/max_positive"] < 1.2 or correction == "geometric_mask"
    assert (touched > 0) == (correction != "icepop"), "noise of 2 % passes the cap and the tight bounds, not [0.5, 5]"


def test_the_engines_log_probs_as_the_old_ones_clip_what_the_engine_got_wrong(worlds, checkpoint):
    """Noise of 0.5 nats is outside of the clip range before the first update."""
    trainer, engine = (run(worlds, checkpoint, noise=0.5, updates_per_step=1, old_policy=old)["rows"][-1] for old in ("trainer", "engine"))
    assert trainer["clip/positive"] + trainer["clip/negative"] == 0
    assert engine["clip/positive"] + engine["clip/negative"] > 0.1


def test_calibrated_bounds_move_every_so_many_steps(worlds, checkpoint):
    rows = run(worlds, checkpoint, calibrate_every=2, correction="tis")["rows"][1:]
    bounds = [(row["clip/bound_low"], row["clip/bound_high"]) for row in rows]
    assert bounds[1] == bounds[0], "the second step is none of calibration"
    assert all(abs(low - 0.8) <= 0.1 and abs(high - 1.2) <= 0.2 for low, high in bounds)


@pytest.mark.parametrize("kl_in", ["advantage", "loss"])
def test_a_policy_learns_what_its_teacher_knows(worlds, checkpoint, model_folder, kl_in):
    """There are no rewards, and the teacher is of another family. For other layouts see test_layouts.py: the reference uses the same
    code."""
    call = partial(training_runs.run_loop, teacher={"path": model_folder("qwen3_moe"), "reward_coef": 0.0, "kl_in": kl_in})
    rows = worlds(1).call(call, checkpoint, FP8, {"updates_per_step": 2}, STEPS, 0.0)[0]["rows"][1:]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[-1]["teacher/kl"] < 0.9 * rows[0]["teacher/kl"], "on the same answers, step after step"
    if kl_in == "loss":
        assert rows[-1]["loss/teacher_kl"] < 0.9 * rows[0]["loss/teacher_kl"] and rows[0]["loss/policy"] == 0
        return
    own = partial(training_runs.run_loop, teacher={"path": checkpoint, "reward_coef": 0.0})
    first = worlds(1).call(own, checkpoint, FP8, {}, 1, 0.0)[0]["rows"][1]
    assert first["teacher/kl"] == first["teacher/kl_max"] == 0, "the policy's own weights give the policy's own bits"
