"""Calibrated clipping (arXiv 2609.22870): moves PPO's bounds so that they clip in FP8 the same tokens as without FP8.

Quantization noise in both factors of a ratio pushes tokens below 1 - low that the exact ratio would keep. For A < 0 their gradient is lost,
so bad responses are not penalized. With r the ratios in FP8, R the ratios of a forward pass with the master weights, [l, h] the configured
bounds, w the mismatch correction, and p the engine's probability of a token:

    1.  L: share of {r <= L} = share of {R <= l}, both among tokens with A < 0
    2.  H: balance(r, L, H) = balance(R, l, h), where
        balance(x, low, high) = |sum over A > 0 of w p x A [x < high]| / |sum over A < 0 of w p x A [x > low]|
    3.  each bound moves halfway to its target, by at most 0.05 (L) or 0.1 (H)

L and H are searched on a grid of 0.02 within [0.5, 0.9] and [1.2, 2.0], and at the configured bound. Ties go to the value nearest to the
configured bound, so nothing moves without noise.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

Bounds = tuple[float, float]
LogprobFunction = Callable[[list[TrainingSample], bool], list[torch.Tensor]]
"""(samples, quantized) -> log-probs of each sample's response tokens under the current weights."""
AddUp = Callable[[Sequence[float]], list[float]]
"""Sums numbers over replicas; collective (`mcore.passes.reduce.sum_over_replicas`)."""

_LOW_GRID = [0.5 + 0.02 * step for step in range(21)]
_HIGH_GRID = [1.2 + 0.02 * step for step in range(41)]
_LARGEST_MOVE = (0.05, 0.1)


@dataclass(frozen=True)
class CalibrationTokens:
    """Inputs of the calibration: float tensors [N] over response tokens."""

    quantized: torch.Tensor
    """Ratios as the loss sees them."""
    exact: torch.Tensor
    """Ratios without FP8."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """w p of the formulas: the correction times the engine's probability."""


def find_target_bounds(tokens: CalibrationTokens, reference: Bounds, add_up: AddUp = list) -> Bounds:
    """Return (L, H) of the formulas, or the reference bounds if no advantage is positive or none is negative.

    `tokens` are this replica's. Replicas exchange only sums, one per value of the grids.
    """
    lows, highs = [*_LOW_GRID, reference[0]], [*_HIGH_GRID, reference[1]]
    negative, positive = tokens.advantages < 0, tokens.advantages > 0
    exact, quantized = ((tokens.weights * ratios * tokens.advantages).double() for ratios in (tokens.exact, tokens.quantized))
    below = [tokens.exact[negative] <= reference[0], *(tokens.quantized[negative] <= bound for bound in lows)]
    up = [exact[positive & (tokens.exact < reference[1])], *(quantized[positive & (tokens.quantized < bound)] for bound in highs)]
    down = [exact[negative & (tokens.exact > reference[0])], *(quantized[negative & (tokens.quantized > bound)] for bound in lows)]
    sums = iter(add_up([float(part.sum()) for part in (negative, positive, *below, *up, *down)]))
    negatives, positives = next(sums), next(sums)
    if not negatives or not positives:
        return reference
    target, *shares = (next(sums) / negatives for _ in below)
    low = _nearest(dict(zip(lows, shares, strict=True)), target, reference[0])
    (exact_up, *ups), (exact_down, *downs) = ([abs(next(sums)) for _ in parts] for parts in (up, down))
    if not exact_down:
        return low, reference[1]
    passing = downs[lows.index(low)]
    balances = {bound: value / passing if passing else math.inf for bound, value in zip(highs, ups, strict=True)}
    return low, _nearest(balances, exact_up / exact_down, reference[1])


def move_bounds(bounds: Bounds, target: Bounds) -> Bounds:
    """Move `bounds` halfway to `target`, by at most `_LARGEST_MOVE`."""
    steps = [min(max((to - start) / 2, -largest), largest) for start, to, largest in zip(bounds, target, _LARGEST_MOVE, strict=True)]
    return bounds[0] + steps[0], bounds[1] + steps[1]


def _nearest(measures: dict[float, float], target: float, reference: float) -> float:
    """Return the bound whose measure is nearest to `target`. Ties, up to rounding, go to the bound nearest to the reference."""
    return min(measures, key=lambda bound: (round(abs(measures[bound] - target), 12), abs(bound - reference)))


class ClipCalibration:
    """Tracks the bounds over a run.

    Call `begin` before a step's first update and `end` before its last update, both with this replica's samples of the last update.
    """

    def __init__(self, config: AlgorithmConfig, logprobs: LogprobFunction, add_up: AddUp = list) -> None:
        self._config, self._logprobs, self._add_up = config, logprobs, add_up
        self._reference = (1 - config.clip_low, 1 + config.clip_high)
        self.bounds, self._exact_old = self._reference, list[torch.Tensor]()

    @property
    def config(self) -> AlgorithmConfig:
        """The algorithm's config with the current bounds."""
        if self.bounds == self._reference:
            return self._config
        return self._config.model_copy(update={"clip_low": 1 - self.bounds[0], "clip_high": self.bounds[1] - 1})

    def begin(self, samples: list[TrainingSample]) -> None:
        """Record the exact log-probs before the step's first update."""
        self._exact_old = self._logprobs(samples, False)

    def end(self, samples: list[TrainingSample]) -> None:
        """Measure the ratios that the step's last update will see, and move the bounds."""
        quantized, exact = self._logprobs(samples, True), self._logprobs(samples, False)
        tokens = CalibrationTokens(
            _join(quantized).sub(_join(sample.old_logprobs for sample in samples)).exp(),
            _join(exact).sub(_join(self._exact_old)).exp(),
            _join(sample.advantages for sample in samples),
            _join(_sampling_weight(sample) for sample in samples),
        )
        self.bounds = move_bounds(self.bounds, find_target_bounds(tokens, self._reference, self._add_up))


def _join(values_B: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *values_B])


def _sampling_weight(sample: TrainingSample) -> torch.Tensor:
    probability = sample.rollout_logprobs.exp()
    return probability * sample.importance_weights if len(sample.importance_weights) else probability
