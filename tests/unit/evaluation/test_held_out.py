"""Metrics of the evaluations during training."""

from __future__ import annotations

import pytest

from megatron_rl.evaluation.held_out import compute_eval_metrics
from megatron_rl.metrics import describe
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.types import Completion, Problem, Reward


def answered(level: int, *answers: str) -> list[Completion]:
    """Completions of a problem whose answer is 7."""
    problem = Problem(f"p{level}", "q", "7", level=level)
    return [Completion(problem, [1], [2], [0.0], "stop", 1, text, Reward(0.0, text == "7", answer=text)) for text in answers]


def test_one_completion_each_gives_accuracies_alone():
    rollout = RolloutBatch([*answered(1, "7"), *answered(2, "8")], {"ahead/generate": 1.5, "ahead/reward": 0.5})
    assert compute_eval_metrics(rollout, 1) == {"eval/accuracy": 0.5, "eval/level_1": 1.0, "eval/level_2": 0.0, "time/eval": 2.0}
    assert compute_eval_metrics(RolloutBatch([]), 1) == {}


def test_several_completions_give_the_mean_and_what_one_of_them_and_their_majority_get_right():
    answers = (("7", "7", "9", "8"), ("9", "9", "7", "7"), ("9", "9", "9", "7"), ("8", "9", "", ""))
    rollout = RolloutBatch([completion for level, texts in enumerate(answers) for completion in answered(level, *texts)])
    metrics = compute_eval_metrics(rollout, 4)
    assert metrics["eval/accuracy"] == pytest.approx(5 / 16) and metrics["eval/level_2"] == 0.25
    assert metrics["eval/pass@4"] == 0.75
    assert metrics["eval/maj@4"] == pytest.approx((1 + 0.5 + 0 + 0) / 4)  # a tie is won half the time
    assert describe("eval/maj@4").label == "maj@4"
