"""Calibrated clipping (arXiv 2609.22870): move PPO's bounds so that they clip in FP8 what they would clip without it.

Quantisation noise in both factors of a ratio pushes tokens below 1 - low that the exact ratio would keep; for A < 0 their gradient is
lost, and bad answers go unpunished. r are the ratios in FP8, R those of a forward pass with the masters, [l, h] the
configured bounds, w the mismatch correction and p the engine's probability of a token:

    1.  L: share of {r <= L} = share of {R <= l}, both among tokens with A < 0
    2.  H: balance(r, L, H) = balance(R, l, h), where
        balance(x, low, high) = |sum over A > 0 of w p x A [x < high]| / |sum over A < 0 of w p x A [x > low]|
    3.  each bound moves half the way to its target, at most 0.05 (L) or 0.1 (H)

L and H are searched on a grid of 0.02 within [0.5, 0.9] and [1.2, 2.0], and at the configured bound. Of equally good values the one
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
"""(samples, quantized) -> log-probs of each sample's answer tokens under the current weights."""

_LOW_GRID = [0.5 + 0.02 * step for step in range(21)]
_HIGH_GRID = [1.2 + 0.02 * step for step in range(41)]
_LARGEST_MOVE = (0.05, 0.1)


@dataclass(frozen=True)
class CalibrationTokens:
    """Inputs of the calibration: float tensors [N] over answer tokens."""

    quantized: torch.Tensor
    """Ratios as the loss sees them."""
    exact: torch.Tensor
    """Ratios without FP8."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """w p: the correction times the engine's probability."""


def find_target_bounds(tokens: CalibrationTokens, reference: Bounds) -> Bounds:
    """Return (L, H) of the formulas; the reference bounds where no advantage is positive or none negative."""
    negative, positive = tokens.advantages < 0, tokens.advantages > 0
    if not negative.any() or not positive.any():
        return reference
    target = (tokens.exact[negative] <= reference[0]).double().mean().item()
    low = _nearest(_LOW_GRID, lambda bound: (tokens.quantized[negative] <= bound).double().mean().item(), target, reference[0])
    balance = _balance(tokens, tokens.exact, reference)
    if not math.isfinite(balance):
        return low, reference[1]
    return low, _nearest(_HIGH_GRID, lambda bound: _balance(tokens, tokens.quantized, (low, bound)), balance, reference[1])


def move_bounds(bounds: Bounds, target: Bounds) -> Bounds:
    """Move `bounds` half the way to `target`, by at most `_LARGEST_MOVE`."""
    steps = [min(max((to - start) / 2, -largest), largest) for start, to, largest in zip(bounds, target, _LARGEST_MOVE, strict=True)]
    return bounds[0] + steps[0], bounds[1] + steps[1]


def _nearest(grid: list[float], measure: Callable[[float], float], target: float, reference: float) -> float:
    """Return the bound whose measure is nearest to `target`; of equals (up to rounding) the one nearest to the reference bound."""
    return min([*grid, reference], key=lambda bound: (round(abs(measure(bound) - target), 12), abs(bound - reference)))


def _balance(tokens: CalibrationTokens, ratios: torch.Tensor, bounds: Bounds) -> float:
    """Return updates of positive over updates of negative tokens within the bounds; infinite where no negative token passes."""
    updates = (tokens.weights * ratios * tokens.advantages).double()
    up = updates[(tokens.advantages > 0) & (ratios < bounds[1])].sum().abs()
    down = updates[(tokens.advantages < 0) & (ratios > bounds[0])].sum().abs()
    return float(up / down) if down else float("inf")


class ClipCalibration:
    """The bounds over a run. Call `begin` before a step's first update and `end` before its last, both on the samples of the last."""

    def __init__(self, config: AlgorithmConfig, logprobs: LogprobFunction) -> None:
        self._config, self._logprobs = config, logprobs
        self._reference = (1 - config.clip_low, 1 + config.clip_high)
        self.bounds, self._exact_old = self._reference, list[torch.Tensor]()

    @property
    def config(self) -> AlgorithmConfig:
        """The algorithm with the current bounds."""
        if self.bounds == self._reference:
            return self._config
        return self._config.model_copy(update={"clip_low": 1 - self.bounds[0], "clip_high": self.bounds[1] - 1})

    def begin(self, samples: list[TrainingSample]) -> None:
        """Record the exact log-probs before the step's first update."""
        self._exact_old = self._logprobs(samples, False)

    def end(self, samples: list[TrainingSample]) -> None:
        """Measure the ratios that the step's last update will see, and move the bounds."""
        quantized, exact = self._logprobs(samples, True), self._logprobs(samples, False)
        old = [sample.old_logprobs for sample in samples]
        tokens = CalibrationTokens(
            torch.cat(quantized).sub(torch.cat(old)).exp(),
            torch.cat(exact).sub(torch.cat(self._exact_old)).exp(),
            torch.cat([torch.full((sample.sampled_count,), sample.advantage) for sample in samples]),
            torch.cat([_sampling_weight(sample) for sample in samples]),
        )
        self.bounds = move_bounds(self.bounds, find_target_bounds(tokens, self._reference))


def _sampling_weight(sample: TrainingSample) -> torch.Tensor:
    probability = sample.rollout_logprobs.exp()
    return probability * sample.importance_weights if len(sample.importance_weights) else probability
