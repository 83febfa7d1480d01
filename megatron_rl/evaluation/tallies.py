"""Counts completions in one tally per problem, and turns tallies into tables by data set and level.

A tally holds only counts, so every figure of a table can be recomputed from `eval.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from megatron_rl.evaluation.statistics import Estimate, estimate_difference, estimate_mean, majority_at_k, pass_at_k, sign_flip_p_value
from megatron_rl.rewards import math
from megatron_rl.types import Completion, Problem, Reward


@dataclass(frozen=True)
class Outcome:
    """A scored completion."""

    text: str
    reward: Reward
    tokens: int
    finish_reason: str

    @classmethod
    def of(cls, completion: Completion) -> Outcome:
        return cls(completion.text, completion.reward, completion.sampled_count, completion.finish_reason)

    def answer(self, problem: Problem) -> str | None:
        """Return the answer that the completion votes for, or None if it has no vote.

        All correct completions vote for the gold answer, however they spell it. Others vote for the answer that the reward function
        extracted, or, if it does not report one, for what `rewards.math.final_answer` finds.
        """
        if self.reward.correct:
            return problem.answer
        if self.reward.error:
            return None
        return math.final_answer(self.text) if self.reward.answer is None else self.reward.answer or None


@dataclass(frozen=True)
class Tally:
    """Counts over the completions of one problem. `votes` holds (completions, correct completions) per answer, most frequent first."""

    id: str
    source: str
    level: int
    samples: int
    correct: int
    votes: tuple[tuple[int, int], ...]
    reward: float
    """Sum of the rewards of all completions."""
    tokens: tuple[int, ...]
    truncated: int
    errors: int

    @classmethod
    def of(cls, problem: Problem, outcomes: Sequence[Outcome]) -> Tally:
        answers = [outcome.answer(problem) for outcome in outcomes]
        correct = Counter(answer for answer, outcome in zip(answers, outcomes, strict=True) if outcome.reward.correct)
        most_common = Counter(answer for answer in answers if answer is not None).most_common()
        return cls(
            id=problem.id,
            source=problem.source,
            level=problem.level,
            samples=len(outcomes),
            correct=sum(outcome.reward.correct for outcome in outcomes),
            votes=tuple((count, correct[answer]) for answer, count in most_common),
            reward=sum(outcome.reward.value for outcome in outcomes),
            tokens=tuple(outcome.tokens for outcome in outcomes),
            truncated=sum(outcome.finish_reason == "length" for outcome in outcomes),
            errors=sum(bool(outcome.reward.error) for outcome in outcomes),
        )


TableGroup = tuple[str | None, int | None]
"""(data set, level) of a table row; None means all."""
_Values = dict[str, list[float]]


def group_tallies(tallies: Sequence[Tally]) -> dict[TableGroup, list[int]]:
    """Return the groups of a table with the indices of their problems.

    The groups are: all problems; each data set, if there are several; and each level of a data set with several levels.
    """
    groups: dict[TableGroup, list[int]] = {(None, None): list(range(len(tallies)))}
    sources = sorted({tally.source for tally in tallies})
    for source in sources:
        members = [index for index, tally in enumerate(tallies) if tally.source == source]
        levels = sorted({tallies[index].level for index in members})
        if len(sources) > 1:
            groups[source, None] = members
        if len(levels) > 1:
            groups |= {(source, level): [index for index in members if tallies[index].level == level] for level in levels}
    return groups


def build_table(tallies: Sequence[Tally], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per group with `mean` (mean@K), `pass` and `maj` by k, each as {value, low, high}, and figures of the completions."""
    values, samples = _compute_scores(tallies, ks), tallies[0].samples
    return [
        {
            **_describe_group(group, members),
            **_estimate_row(values, members, lambda scores: estimate_mean(scores, samples)),
            **_summarize_completions([tallies[index] for index in members]),
        }
        for group, members in group_tallies(tallies).items()
    ]


def compare_tallies(tallies: Sequence[Tally], baseline: Sequence[Tally], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per group with the differences checkpoint - baseline and their intervals, as in `build_table`.

    `p` is the p-value of the mean; `better` and `worse` count problems. Both sides must have the same problems in the same order.
    """
    if [tally.id for tally in tallies] != [tally.id for tally in baseline]:
        raise AssertionError("the two sides were asked different problems")
    scores, baseline_scores = _compute_scores(tallies, ks), _compute_scores(baseline, ks)
    differences = {name: [a - b for a, b in zip(scores[name], baseline_scores[name], strict=True)] for name in scores}
    gains = [tally.correct - other.correct for tally, other in zip(tallies, baseline, strict=True)]
    return [
        {
            **_describe_group(group, members),
            **_estimate_row(differences, members, estimate_difference),
            "p": sign_flip_p_value([gains[index] for index in members]),
            "better": sum(gains[index] > 0 for index in members),
            "worse": sum(gains[index] < 0 for index in members),
        }
        for group, members in group_tallies(tallies).items()
    ]


def _compute_scores(tallies: Sequence[Tally], ks: Sequence[int]) -> _Values:
    """Return the values `mean`, `pass:k`, and `maj:k` of every problem."""
    majorities = [majority_at_k(tally.votes, tally.samples, ks) for tally in tallies]
    scores = {"mean": [tally.correct / tally.samples for tally in tallies]}
    scores |= {f"pass:{k}": [pass_at_k(tally.correct, tally.samples, k) for tally in tallies] for k in ks}
    return scores | {f"maj:{k}": [shares[index] for shares in majorities] for index, k in enumerate(ks)}


def _estimate_row(values: _Values, members: list[int], estimate: Callable[[list[float]], Estimate]) -> dict[str, Any]:
    """Return the estimates over the problems `members` as a table row."""
    row: dict[str, Any] = {"mean": {}, "pass": {}, "maj": {}}
    for name, scores in values.items():
        kind, _, k = name.partition(":")
        estimated = asdict(estimate([scores[index] for index in members]))
        row[kind] |= {k: estimated} if k else estimated
    return row


def _describe_group(group: TableGroup, members: list[int]) -> dict[str, Any]:
    return {"source": group[0], "level": group[1], "problems": len(members)}


def _summarize_completions(tallies: Sequence[Tally]) -> dict[str, Any]:
    lengths = [length for tally in tallies for length in tally.tokens]
    count = len(lengths)
    return {
        "reward": sum(tally.reward for tally in tallies) / count,
        "tokens": {"mean": fmean(lengths), "median": median(lengths), "max": max(lengths)},
        "truncated": sum(tally.truncated for tally in tallies) / count,
        "unanswered": 1 - sum(votes for tally in tallies for votes, _ in tally.votes) / count,
        "errors": sum(tally.errors for tally in tallies),
    }
