"""Whether the engine's tokens are draws from the distribution that it reports; docs/reference/sync.md explains the tests.

Every test bounds a sum whose terms have a mean of 0 given all that was drawn before, so tokens of one completion may depend on each other.
Right draws exceed a bound in fewer than `FALSE_ALARMS` of all steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.errors import DrawError
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.draws import FIELDS, FILTER_FIELDS, DrawRecord
from megatron_rl.metrics import declare
from megatron_rl.rollout.metrics import EQUAL, MOST_EQUAL
from megatron_rl.types import SamplingParams

FALSE_ALARMS = 1e-9
SHARE_ON_GPU = 1 / 32  # of the tokens, which are all checked on a CPU
MEMORY = 0.8  # weight of all earlier steps in the sums of a step
_ROUNDING = 1e-5  # of a cumulative probability or a log-prob, between engine and trainer that are exact
_TESTS = 5
_PANEL, _NUMBERS = "draws (standard deviations)", "the random numbers of {}, which are independent of each other if the engine draws right"
_CHECKED, _OTHER, _FILTERED, _FAILED = (
    declare("draws/checked", "tokens whose draw was checked", "count"),
    declare("draws/other", "checked tokens that the trainer's distribution and the token's seed do not give", "count"),
    declare("draws/filtered", "checked tokens whose kept tokens are not those of top_p, top_k, and min_p", "count"),
    declare("draws/failed", "tests of the draws that failed in this step", "count"),
)
_SURPRISE = declare("draws/surprise", "sum of -log p - entropy over tokens, relative to its standard deviation", "number", _PANEL)
_SUCCESSIVE = declare("draws/successive", f"correlation of {_NUMBERS.format('successive tokens')}", "number", _PANEL)
_POSITION = declare("draws/same_position", f"correlation of {_NUMBERS.format('tokens at the same position')}", "number", _PANEL)
_TOKEN = declare("draws/token", "evidence that the most conspicuous token is drawn too often or too seldom", "nats")
_DEPENDENT = "{} are drawn with random numbers that depend on each other"
_SUMS = {
    _SURPRISE: [f"the tokens are {how} probable than draws from their distribution are" for how in ("more", "less")],
    _SUCCESSIVE: [_DEPENDENT.format("successive tokens")] * 2,
    _POSITION: [_DEPENDENT.format("tokens at the same position of different samples")] * 2,
}
"""What each sum means below and above its bound."""
OtherDraw = tuple[int, int, int, int]
"""(sample, position, sampled token, recomputed token)."""
_Token = tuple[float, int, float, float, int]
"""(surprise in nats, token, how often it was drawn, how often that was expected, size of the rank's vocabulary)."""


@dataclass
class DrawFacts:
    """Sums over checked tokens of several ranks, and the first token of each fault."""

    tokens: int = 0
    other: int = 0
    filtered: int = 0
    pairs: int = 0
    surprise: float = 0.0
    variance: float = 0.0
    successive: float = 0.0
    longest: int = 0
    first_other: OtherDraw | None = None
    first_filtered: tuple[int, int, str] | None = None  # sample, position, and what is wrong

    def __add__(self, more: DrawFacts) -> DrawFacts:
        def add(name: str) -> object:
            one, other = getattr(self, name), getattr(more, name)
            if name.startswith("first"):
                return min(one, other) if one and other else one or other
            return max(one, other) if name == "longest" else one + other

        return DrawFacts(**{each.name: add(each.name) for each in fields(self)})  # type: ignore[arg-type]


class _Rows(SimpleNamespace):
    """The recorded tokens of this rank in order, as float64 arrays of `FIELDS` and `FILTER_FIELDS`."""

    def __init__(self, record: DrawRecord, samples: Sequence[TrainingSample]) -> None:
        rows = torch.cat(record.rows).cpu().numpy() if record.rows else np.empty((0, len(FIELDS + FILTER_FIELDS)))
        rows = rows[rows[:, 0].argsort()]
        super().__init__(**dict(zip(FIELDS + FILTER_FIELDS, rows.T, strict=True)))
        starts = np.array([0, *accumulate(sample.length - 1 for sample in samples)])
        owners = np.searchsorted(starts, self.place, side="right") - 1
        self.samples = np.array([sample.number for sample in samples] or [0])[owners]
        self.positions = (self.place - starts[owners]).astype(np.int64) + 1  # of the sampled tokens in their samples
        self.centered = (self.below + self.spread * self.probability - 0.5) * math.sqrt(12)  # uniform, of mean 0 and variance 1

    def find_other(self) -> np.ndarray:
        """Return whether a known random number draws another token, beyond rounding."""
        outside = (self.number < self.below - _ROUNDING) | (self.number > self.below + self.probability + _ROUNDING)
        return (self.number >= 0) & outside

    def find_filtered(self, sampling: SamplingParams, exact: bool) -> dict[str, np.ndarray]:
        """Return, by rule, which tokens were drawn from a set that the filters do not give. Without exactness, only what differs by more
        than a nat counts, and `top_p` is not tested, because engines apply it in other orders."""
        slack, least = _ROUNDING if exact else 1.0, math.log(sampling.min_p) if sampling.min_p else -math.inf
        without_last = self.mass - np.exp(self.lowest) * self.most
        has_room = (self.kept < sampling.top_k) & (self.left_out > least + slack) & (self.mass < sampling.top_p - _ROUNDING)
        rules = {
            f"more than top_k = {sampling.top_k} tokens are kept": self.kept > sampling.top_k,
            "a more probable token is left out": self.lowest < self.left_out - slack,
            f"a token below min_p = {sampling.min_p:g} is kept": self.lowest < least - slack,
            f"more tokens than top_p = {sampling.top_p:g} keeps": exact
            & (sampling.top_p < 1)
            & (without_last > sampling.top_p + _ROUNDING),
            "too few tokens are kept": exact & has_room,
        }
        return {rule: broken & (self.kept > 0) for rule, broken in rules.items()}

    def sum(self, sampling: SamplingParams, exact: bool) -> DrawFacts:
        """Return the sums over this rank's tokens."""
        others, rules = np.flatnonzero(self.find_other()), self.find_filtered(sampling, exact)
        filtered = np.flatnonzero(np.any([*rules.values()], 0))
        adjacent = np.flatnonzero(np.diff(self.place) == 1)
        surprise, variance, successive = (
            float(values.sum())
            for values in (-self.logprob - self.entropy, self.variance, self.centered[adjacent] * self.centered[adjacent + 1])
        )
        longest = int(self.positions.max(initial=0))
        facts = DrawFacts(len(self.place), len(others), len(filtered), len(adjacent), surprise, variance, successive, longest)
        for first in others[:1]:
            facts.first_other = (*map(int, (self.samples[first], self.positions[first], self.token[first], self.drawn[first])),)  # type: ignore
        for first in filtered[:1]:
            rule = next(rule for rule, broken in rules.items() if broken[first])
            facts.first_filtered = int(self.samples[first]), int(self.positions[first]), rule
        return facts

    def sum_positions(self, longest: int) -> torch.Tensor:
        """Return the sum of centered numbers and their count at each position, float64 [2, `longest` + 1]."""
        sums = [np.bincount(self.positions, weights, longest + 1) for weights in (self.centered, np.ones(len(self.place)))]
        return torch.from_numpy(np.stack(sums))


def gather_facts(rows: _Rows, sampling: SamplingParams, exact: bool) -> DrawFacts:
    """Return the sums over the ranks of this rank's pipeline stage. Collective."""
    return sum(reduce.gather_from_stage(rows.sum(sampling, exact), DrawFacts), DrawFacts())


def find_other_draw(record: DrawRecord, samples: Sequence[TrainingSample], sampling: SamplingParams) -> OtherDraw | None:
    """Return the first token of all ranks' passes that its seed does not give, or None.
    `samples`: those of this rank. Collective."""
    facts = reduce.gather_from_shards(gather_facts(_Rows(record, samples), sampling, True), DrawFacts)
    return max(facts, key=lambda each: each.tokens).first_other


def find_surprise(count: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return Chernoff's bound of -log of the probability of as many or as few events [n], whose probabilities, each given what happened
    before, sum to `expected` [n]."""
    return torch.xlogy(count, count / expected.clamp(min=1e-300)) - count + expected


class DrawCheck:
    """Checks the draws of every step. Created on every rank."""

    def __init__(self, config: Config, exact: bool, notify: Callable[[str], None]) -> None:
        """`exact`: whether engine and trainer promise identical log-probs. A failed test then ends the run, unless `sync.on_mismatch` is
        "warn"; else it is told once."""
        self._sampling, self._exact, self._notify = config.rollout.to_sampling(), exact, notify
        self._stops, self._told = exact and config.sync.on_mismatch == "stop", set[str]()
        self._selects = bool(config.rollout.over_sampling_prompts or config.algorithm.dynamic_sampling_max_rounds)
        self._sums = torch.zeros(6, dtype=torch.float64)  # surprise, successive, and same position; then the variance of each
        self._most = 0.0  # tokens of a position, in the steps until now
        self._by_token = torch.zeros(2, 0, dtype=torch.float64)  # like `DrawRecord.sums`
        self.share = SHARE_ON_GPU if torch.cuda.is_available() else 1.0

    def check(self, record: DrawRecord, samples: Sequence[TrainingSample], equal_excess: float) -> dict[str, float]:
        """Return the metrics of a step, given what its passes recorded of this rank's samples. Collective. Raise DrawError for a test
        that fails, or tell it. `equal_excess`: see `rollout.metrics.EQUAL`."""
        rows = _Rows(record, samples)
        facts = gather_facts(rows, self._sampling, self._exact)
        sums, counts = reduce.sum_stage(rows.sum_positions(facts.longest))
        same = float((sums.square() - counts).sum()), float(counts.square().sum()) * 2, float(counts.max())
        found = reduce.gather_from_shards((facts, same, self._find_token(record)), tuple[DrawFacts, tuple[float, float, float], _Token])
        facts, same, _ = max(found, key=lambda each: each[0].tokens)  # of the last pipeline stage
        if not facts.tokens:
            return {}
        own = facts.surprise, facts.successive, same[0], facts.variance, facts.pairs, same[1]
        self._sums = self._sums * torch.tensor([MEMORY] * 3 + [MEMORY**2] * 3) + torch.tensor(own)
        self._most = max(self._most * MEMORY, same[2])
        token = max(token for _, _, token in found)
        metrics, failed = self._judge(facts, token, sum(each[2][4] for each in found), equal_excess)
        for name, line in failed.items():
            if self._stops:
                raise DrawError(line)
            if name not in self._told:
                self._notify(line)
        self._told = {*failed}
        return metrics | {_FAILED: float(len(failed))}

    def _find_token(self, record: DrawRecord) -> _Token:
        """Return the token of this rank's vocabulary whose number is the most surprising."""
        sums = reduce.sum_stage(torch.zeros(2, 0, dtype=torch.float64) if record.sums is None else record.sums)
        self._by_token = self._by_token * MEMORY + sums if self._by_token.numel() else sums
        if not sums.numel():  # not the last pipeline stage
            return 0.0, 0, 0.0, 0.0, 0
        expected, counts = self._by_token
        surprise, token = find_surprise(counts, expected).max(0)
        first = reduce.get_shard_number() * len(counts)
        return float(surprise), first + int(token), float(counts[token]), float(expected[token]), len(counts)

    def _judge(self, facts: DrawFacts, token: _Token, vocabulary: int, equal_excess: float) -> tuple[dict[str, float], dict[str, str]]:
        """Return the metrics of a step, and a line for each test that fails, by its metric."""
        values, deviations = self._sums[:3], self._sums[3:].clamp(min=1e-9).sqrt()
        scores = dict(zip(_SUMS, (values / deviations).tolist(), strict=True))
        level = math.log(2 * _TESTS / FALSE_ALARMS)
        scale = 1.0, 1.0, 2 * self._most  # of the terms' tails
        bounds = [math.sqrt(2 * level) + level * tail / deviation for tail, deviation in zip(scale, deviations.tolist(), strict=True)]
        failed = self._name_tokens(facts)
        for (name, score), bound in zip(scores.items(), bounds, strict=True):
            if abs(score) > bound and not self._selects:
                failed[name] = f"{name} = {score:.1f}, bound {bound:.1f}: {_SUMS[name][score > 0]}"
        surprise, number, count, expected, _ = token
        if surprise > level + math.log(vocabulary) and not self._selects:
            failed[_TOKEN] = f"draws/token: token {number} was drawn {count:.0f} times where its probabilities give {expected:.1f}"
        if equal_excess > MOST_EQUAL:
            failed[EQUAL] = (
                f"{EQUAL} = {equal_excess:.1f}: completions of different seeds are equal, as if drawn with the same random numbers"
            )
        numbers = map(float, (facts.tokens, facts.other, facts.filtered))
        return dict(zip((_CHECKED, _OTHER, _FILTERED), numbers, strict=True)) | scores | {_TOKEN: surprise}, failed

    def _name_tokens(self, facts: DrawFacts) -> dict[str, str]:
        """Return a line for the first token that its seed, and the first whose kept tokens the filters, do not give, by metric."""
        failed = {}
        if facts.first_other is not None and self._exact:
            number, position, sampled, drawn = facts.first_other
            failed[_OTHER] = (
                f"draws/other: {facts.other} of {facts.tokens} tokens are not those of their seeds: at position {position} of sample "
                f"{number} the engine sampled token {sampled}, the trainer's distribution, filters, and seed give {drawn}"
            )
        if facts.first_filtered is not None:
            number, position, rule = facts.first_filtered
            failed[_FILTERED] = (
                f"draws/filtered: the kept tokens of {facts.filtered} tokens are wrong: sample {number}, position {position}: {rule}"
            )
        return failed
