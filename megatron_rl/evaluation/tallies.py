"""From completions to one record per problem, and from records to tables by data set and level.

A record holds counts, so every figure of a table can be computed from `eval.json` again; nothing here touches an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from megatron_rl.config.data import GENERATED_SOURCE
from megatron_rl.evaluation.statistics import Estimate, estimate_difference, estimate_mean, majority_at_k, pass_at_k, sign_flip_p_value
from megatron_rl.rewards import arithmetic, math
from megatron_rl.types import Problem, Reward


@dataclass(frozen=True)
class Outcome:
    """One completion, scored."""

    text: str
    reward: Reward
    tokens: int
    finish_reason: str

    def answer(self, problem: Problem) -> str | None:
        """What the completion votes for; None where it has no vote.

        All that the reward calls correct state the same answer, however they spell it: the gold. Others are told apart by what the reward
        functions read: the integer after the last `#`, and except in generated problems whatever `rewards.math.final_answer` finds.
        """
        if self.reward.correct:
            return problem.answer
        if self.reward.error:
            return None
        answer = arithmetic.final_answer(self.text)
        return answer if answer is not None or problem.source == GENERATED_SOURCE else math.final_answer(self.text)


@dataclass(frozen=True)
class Tally:
    """All completions of one problem, counted. `votes`: (completions, correct ones among them) of each answer, most frequent first."""

    id: str
    source: str
    level: int
    samples: int
    correct: int
    votes: tuple[tuple[int, int], ...]
    reward: float
    """Sum over the completions."""
    tokens: tuple[int, ...]
    truncated: int
    errors: int

    @classmethod
    def of(cls, problem: Problem, outcomes: Sequence[Outcome]) -> Tally:
        answers = [outcome.answer(problem) for outcome in outcomes]
        right = Counter(answer for answer, outcome in zip(answers, outcomes, strict=True) if outcome.reward.correct)
        ordered = Counter(answer for answer in answers if answer is not None).most_common()
        return cls(
            id=problem.id,
            source=problem.source,
            level=problem.level,
            samples=len(outcomes),
            correct=sum(outcome.reward.correct for outcome in outcomes),
            votes=tuple((count, right[answer]) for answer, count in ordered),
            reward=sum(outcome.reward.value for outcome in outcomes),
            tokens=tuple(outcome.tokens for outcome in outcomes),
            truncated=sum(outcome.finish_reason == "length" for outcome in outcomes),
            errors=sum(bool(outcome.reward.error) for outcome in outcomes),
        )


TableGroup = tuple[str | None, int | None]
"""(data set, level) of a line; None stands for all of them."""
_Values = dict[str, list[float]]


def group_tallies(tallies: Sequence[Tally]) -> dict[TableGroup, list[int]]:
    """The lines of a table, each with the places of its problems: all; each data set where there are several; each level within a data set
    that has several."""
    found: dict[TableGroup, list[int]] = {(None, None): list(range(len(tallies)))}
    sources = sorted({tally.source for tally in tallies})
    for source in sources:
        places = [place for place, tally in enumerate(tallies) if tally.source == source]
        levels = sorted({tallies[place].level for place in places})
        if len(sources) > 1:
            found[source, None] = places
        if len(levels) > 1:
            found |= {(source, level): [place for place in places if tallies[place].level == level] for level in levels}
    return found


def build_table(tallies: Sequence[Tally], ks: Sequence[int]) -> list[dict[str, Any]]:
    """A line per group: `mean` (mean@K), `pass` and `maj` by k as text, each {value, low, high}; and what the completions were like."""
    values, samples = _per_problem(tallies, ks), tallies[0].samples

    def estimate(found: list[float]) -> Estimate:
        return estimate_mean(found, samples)

    return [
        {**_head(group, places), **_estimates(values, places, estimate), **_manner([tallies[place] for place in places])}
        for group, places in group_tallies(tallies).items()
    ]


def compare_tallies(tallies: Sequence[Tally], baseline: Sequence[Tally], ks: Sequence[int]) -> list[dict[str, Any]]:
    """A line per group: differences, checkpoint less baseline, with their intervals, as in `table`; `p` of the mean; and on how many
    problems the checkpoint was `better` and `worse`. Both must hold the same problems in the same order."""
    if [tally.id for tally in tallies] != [tally.id for tally in baseline]:
        raise AssertionError("the two sides were asked different problems")
    mine, theirs = _per_problem(tallies, ks), _per_problem(baseline, ks)
    differences = {name: [one - other for one, other in zip(mine[name], theirs[name], strict=True)] for name in mine}
    gains = [one.correct - other.correct for one, other in zip(tallies, baseline, strict=True)]
    return [
        {
            **_head(group, places),
            **_estimates(differences, places, estimate_difference),
            "p": sign_flip_p_value([gains[place] for place in places]),
            "better": sum(gains[place] > 0 for place in places),
            "worse": sum(gains[place] < 0 for place in places),
        }
        for group, places in group_tallies(tallies).items()
    ]


def _per_problem(tallies: Sequence[Tally], ks: Sequence[int]) -> _Values:
    """`mean`, `pass:k` and `maj:k` of every problem."""
    majorities = [majority_at_k(tally.votes, tally.samples, ks) for tally in tallies]
    found = {"mean": [tally.correct / tally.samples for tally in tallies]}
    found |= {f"pass:{k}": [pass_at_k(tally.correct, tally.samples, k) for tally in tallies] for k in ks}
    return found | {f"maj:{k}": [shares[place] for shares in majorities] for place, k in enumerate(ks)}


def _estimates(values: _Values, places: list[int], estimate: Callable[[list[float]], Estimate]) -> dict[str, Any]:
    """`values` of the problems at `places`, estimated, in the shape of a table's line."""
    line: dict[str, Any] = {"mean": {}, "pass": {}, "maj": {}}
    for name, found in values.items():
        kind, _, k = name.partition(":")
        estimated = asdict(estimate([found[place] for place in places]))
        line[kind] |= {k: estimated} if k else estimated
    return line


def _head(group: TableGroup, places: list[int]) -> dict[str, Any]:
    return {"source": group[0], "level": group[1], "problems": len(places)}


def _manner(tallies: Sequence[Tally]) -> dict[str, Any]:
    lengths = [length for tally in tallies for length in tally.tokens]
    count = len(lengths)
    return {
        "reward": sum(tally.reward for tally in tallies) / count,
        "tokens": {"mean": fmean(lengths), "median": median(lengths), "max": max(lengths)},
        "truncated": sum(tally.truncated for tally in tallies) / count,
        "unanswered": 1 - sum(votes for tally in tallies for votes, _ in tally.votes) / count,
        "errors": sum(tally.errors for tally in tallies),
    }
