"""Calibrated clipping (arXiv 2609.22870): PPO's bounds moved to where they clip in FP8 what they would clip without.

Both factors of a ratio carry quantisation noise, which carries tokens across 1 - low that the exact ratio would keep; for A < 0 their
gradient is lost, and bad answers go unpunished. r are the ratios in FP8, R those of a forward pass with the masters, [l, h] the
configured bounds, w the mismatch correction and p the engine's probability of a token:

    1.  L: share of {r <= L} = share of {R <= l}, both among tokens with A < 0
    2.  H: balance(r, L, H) = balance(R, l, h), where
        balance(x, low, high) = |sum over A > 0 of w p x A [x < high]| / |sum over A < 0 of w p x A [x > low]|
    3.  each bound moves half the way to its target, at most 0.05 (L) or 0.1 (H)

L and H are looked for on a grid of 0.02 within [0.5, 0.9] and [1.2, 2.0], and at the configured bound. Of equally good values the one
next to the configured bound is taken, so without noise nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

Bounds = tuple[float, float]
LogprobFunction = Callable[[list[TrainingSample], bool], list[torch.Tensor]]
"""(sequences, quantised) -> log-probs of each one's answer tokens under the weights of now."""

_LOW_GRID = [0.5 + 0.02 * step for step in range(21)]
_HIGH_GRID = [1.2 + 0.02 * step for step in range(41)]
_LARGEST_MOVE = (0.05, 0.1)


@dataclass(frozen=True)
class CalibrationTokens:
    """What calibration looks at: float tensors [N] over answer tokens."""

    quantised: torch.Tensor
    """Ratios as the loss sees them."""
    exact: torch.Tensor
    """The same without FP8."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """w p: the correction times the engine's probability."""


def find_target_bounds(tokens: CalibrationTokens, reference: Bounds) -> Bounds:
    """(L, H) of the formulas. Where a sign of advantage does not occur, the reference bounds."""
    negative, positive = tokens.advantages < 0, tokens.advantages > 0
    if not negative.any() or not positive.any():
        return reference
    wanted = (tokens.exact[negative] <= reference[0]).double().mean().item()
    low = _nearest(_LOW_GRID, lambda bound: (tokens.quantised[negative] <= bound).double().mean().item(), wanted, reference[0])
    balance = _balance(tokens, tokens.exact, reference)
    if not math.isfinite(balance):
        return low, reference[1]
    return low, _nearest(_HIGH_GRID, lambda bound: _balance(tokens, tokens.quantised, (low, bound)), balance, reference[1])


def move_bounds(bounds: Bounds, target: Bounds) -> Bounds:
    """Half the way from `bounds` to `target`, at most the largest move."""
    steps = [min(max((to - now) / 2, -largest), largest) for now, to, largest in zip(bounds, target, _LARGEST_MOVE, strict=True)]
    return bounds[0] + steps[0], bounds[1] + steps[1]


def _nearest(grid: list[float], measure: Callable[[float], float], wanted: float, reference: float) -> float:
    """The value whose measure is nearest to the one wanted; of equals (up to rounding) the one nearest to the reference bound."""
    return min([*grid, reference], key=lambda bound: (round(abs(measure(bound) - wanted), 12), abs(bound - reference)))


def _balance(tokens: CalibrationTokens, ratios: torch.Tensor, bounds: Bounds) -> float:
    """Updates of positive over updates of negative tokens that the bounds let through; infinite where no negative one passes."""
    updates = (tokens.weights * ratios * tokens.advantages).double()
    up = updates[(tokens.advantages > 0) & (ratios < bounds[1])].sum().abs()
    down = updates[(tokens.advantages < 0) & (ratios > bounds[0])].sum().abs()
    return float(up / down) if down else float("inf")


class ClipCalibration:
    """The bounds over a run. `begin` and `end` enclose a step's first updates, on the sequences of its last one."""

    def __init__(self, config: AlgorithmConfig, logprobs: LogprobFunction) -> None:
        self._config, self._logprobs = config, logprobs
        self._reference = (1 - config.clip_low, 1 + config.clip_high)
        self.bounds, self._exact_old = self._reference, list[torch.Tensor]()

    @property
    def config(self) -> AlgorithmConfig:
        """The algorithm with the bounds of now."""
        if self.bounds == self._reference:
            return self._config
        return self._config.model_copy(update={"clip_low": 1 - self.bounds[0], "clip_high": self.bounds[1] - 1})

    def begin(self, sequences: list[TrainingSample]) -> None:
        """Before the step's first update: remembers the exact log-probs."""
        self._exact_old = self._logprobs(sequences, False)

    def end(self, sequences: list[TrainingSample]) -> None:
        """Before the step's last update: measures the ratios that it will see, and moves the bounds."""
        quantised, exact = self._logprobs(sequences, True), self._logprobs(sequences, False)
        old = [sequence.old_logprobs for sequence in sequences]
        tokens = CalibrationTokens(
            torch.cat(quantised).sub(torch.cat(old)).exp(),
            torch.cat(exact).sub(torch.cat(self._exact_old)).exp(),
            torch.cat([torch.full((sequence.sampled_count,), sequence.advantage) for sequence in sequences]),
            torch.cat([_share(sequence) for sequence in sequences]),
        )
        self.bounds = move_bounds(self.bounds, find_target_bounds(tokens, self._reference))


def _share(sequence: TrainingSample) -> torch.Tensor:
    probability = sequence.rollout_logprobs.exp()
    return probability * sequence.importance_weights if len(sequence.importance_weights) else probability
