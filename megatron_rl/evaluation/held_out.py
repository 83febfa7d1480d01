"""Metrics of evaluations during training."""

from megatron_rl.evaluation.statistics import majority_at_k, pass_at_k
from megatron_rl.evaluation.tallies import Outcome, Tally
from megatron_rl.metrics import STEP_SECONDS, declare
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.metrics import compute_accuracies

_HELD_OUT, _PARTS = "[bold green]held-out {:.1%}", "correct, by level or set"
_ACCURACIES = (
    declare(
        "eval/accuracy",
        "share of the held-out problems' completions that are correct",
        "share",
        "correct",
        label="held-out",
        progress=_HELD_OUT,
    ),
    declare("eval/level_{}", "held-out accuracy, level {}", "share", _PARTS, label="level {}"),
    declare("eval/source_{}", "held-out accuracy, set {}", "share", _PARTS, label="{}"),
)
_PASS = declare("eval/pass@{}", "share of held-out problems with a correct completion among {}", "share", "correct", label="pass@{}")
_MAJORITY = declare(
    "eval/maj@{}", "share of held-out problems whose most frequent answer of {} completions is correct", "share", "correct", label="maj@{}"
)
_SECONDS = declare("time/eval", "the evaluation on the held-out problems", "seconds", STEP_SECONDS)


def compute_eval_metrics(rollout: RolloutBatch, samples: int) -> dict[str, float]:
    """Return accuracies, and pass@k and maj@k if `samples` > 1, or {} without completions.

    The rollout has `samples` completions per held-out problem, one problem after the other.
    """
    completions = rollout.completions_B
    if not completions:
        return {}
    metrics = {**compute_accuracies(completions, *_ACCURACIES), _SECONDS: sum(rollout.seconds.values())}
    if samples == 1:
        return metrics
    groups = [completions[start : start + samples] for start in range(0, len(completions), samples)]
    tallies = [Tally.of(group[0].problem, [Outcome.of(completion) for completion in group]) for group in groups]
    passed = sum(pass_at_k(tally.correct, samples, samples) for tally in tallies)
    won = sum(majority_at_k(tally.votes, samples, [samples])[0] for tally in tallies)
    return metrics | {_PASS.format(samples): passed / len(tallies), _MAJORITY.format(samples): won / len(tallies)}
