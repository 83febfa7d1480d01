"""Calibrated clipping: quantile and balance by counting in Python, damping, and which sequences and weights it measures."""

import math
import random

import pytest
import torch

from megatron_rl.algorithm.clip_calibration import CalibrationTokens, ClipCalibration, find_target_bounds, move_bounds
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

REFERENCE = (0.8, 1.2)


def noisy(noise: float, count: int = 4000) -> CalibrationTokens:
    """Ratios around 1 whose logarithms gain Gaussian noise in FP8, as two noisy probabilities give."""
    source = random.Random(5)
    exact = [source.gauss(0, 0.12) for _ in range(count)]
    rows = [
        (math.exp(value + source.gauss(0, noise)), math.exp(value), source.choice([-1.0, -0.5, 0.0, 0.7]), source.uniform(0.1, 1))
        for value in exact
    ]
    return CalibrationTokens(*(torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)))


def clipped_share(ratios: torch.Tensor, tokens: CalibrationTokens, bound: float) -> float:
    chosen = [r for r, a in zip(ratios.tolist(), tokens.advantages.tolist(), strict=True) if a < 0]
    return sum(r <= bound for r in chosen) / len(chosen)


def balance(ratios: torch.Tensor, tokens: CalibrationTokens, low: float, high: float) -> float:
    up = down = 0.0
    for r, a, share in zip(ratios.tolist(), tokens.advantages.tolist(), tokens.weights.tolist(), strict=True):
        if a > 0 and r < high:
            up += share * r * a
        if a < 0 and r > low:
            down += share * r * a
    return abs(up) / abs(down)


@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_the_bounds_clip_in_fp8_what_the_configured_ones_clip_without(noise):
    tokens = noisy(noise)
    low, high = find_target_bounds(tokens, REFERENCE)
    wanted = clipped_share(tokens.exact, tokens, REFERENCE[0])
    assert clipped_share(tokens.quantized, tokens, REFERENCE[0]) > 1.2 * wanted, "the noise clips too much"
    errors = {bound: abs(clipped_share(tokens.quantized, tokens, bound) - wanted) for bound in (low, low - 0.02, low + 0.02)}
    assert low < REFERENCE[0] and min(errors, key=errors.__getitem__) == low
    exact = balance(tokens.exact, tokens, *REFERENCE)
    errors = {bound: abs(balance(tokens.quantized, tokens, low, bound) - exact) for bound in (high, high - 0.02, high + 0.02)}
    assert high > REFERENCE[1] and min(errors, key=errors.__getitem__) == high


def test_without_noise_or_with_one_sign_alone_nothing_moves_and_moves_are_damped():
    assert find_target_bounds(noisy(0.0), REFERENCE) == REFERENCE
    assert find_target_bounds(noisy(0.0), (0.77, 1.25)) == (0.77, 1.25), "bounds that are not on the grid"
    moves = {(0.8, 1.2): (0.8, 1.2), (0.76, 1.24): (0.78, 1.22), (0.5, 2.0): (0.75, 1.3), (0.9, 1.2): (0.85, 1.2)}
    for target, result in moves.items():
        assert move_bounds(REFERENCE, target) == pytest.approx(result)
    tokens = noisy(0.1)
    for sign in (1.0, -1.0, 0.0):
        alone = CalibrationTokens(tokens.quantized, tokens.exact, torch.full_like(tokens.advantages, sign), tokens.weights)
        assert find_target_bounds(alone, REFERENCE) == REFERENCE
    outside = CalibrationTokens(*(torch.tensor(values) for values in ([0.3, 1.0], [0.3, 1.0], [-1.0, 1.0], [1.0, 1.0])))
    assert find_target_bounds(outside, REFERENCE) == REFERENCE, "nothing negative within the bounds"


def test_a_step_is_measured_on_its_last_update_with_corrections_and_engine_probabilities():
    """The recorded forward passes are replayed; the result is that of `find_target_bounds` on numbers put together by hand."""
    tokens = noisy(0.1, 600)
    per = 6
    old, exact_old = torch.full((600,), -1.5), torch.full((600,), -1.25)
    engine = torch.linspace(-2, -1, 600)
    correction = torch.linspace(0.5, 1.5, 600)
    sequences = []
    for start in range(0, 600, per):
        part = slice(start, start + per)
        advantage = tokens.advantages[start].item()
        sequences.append(TrainingSample([1], [2] * per, advantage, rollout_logprobs=engine[part], old_logprobs=old[part]))
        sequences[-1].importance_weights = correction[part]
    passes = iter([exact_old, old + tokens.quantized.log(), exact_old + tokens.exact.log()])
    asked = []

    def logprobs(given: list[TrainingSample], quantized: bool) -> list[torch.Tensor]:
        asked.append((given is sequences, quantized))
        return list(next(passes).split(per))

    clip = ClipCalibration(AlgorithmConfig(updates_per_step=2, calibrate_every=1), logprobs)
    assert clip.config == AlgorithmConfig(updates_per_step=2, calibrate_every=1)
    clip.begin(sequences)
    clip.end(sequences)
    assert asked == [(True, False), (True, True), (True, False)]
    by_hand = CalibrationTokens(tokens.quantized, tokens.exact, tokens.advantages[::per].repeat_interleave(per), correction * engine.exp())
    assert clip.bounds == pytest.approx(move_bounds(REFERENCE, find_target_bounds(by_hand, REFERENCE)), abs=1e-12)
    assert clip.bounds != REFERENCE
    assert (1 - clip.config.clip_low, 1 + clip.config.clip_high) == pytest.approx(clip.bounds)
