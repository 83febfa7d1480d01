"""Corrections, tokens of high covariance and calibrated clips against plain loops; losses of ratios as far from 1 as floats go."""

import math
import random
from typing import Any

import pytest
import torch

from megatron_rl.algorithm import importance_weights
from megatron_rl.algorithm.clip_calibration import CalibrationTokens, ClipCalibration, find_target_bounds, move_bounds
from megatron_rl.algorithm.covariance import mark_high_covariance
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import RunError

ROLLOUT = -2.0
RATIOS = ([1.0, 3.0, 0.4], [0.9, 1.2], [6.0, 0.1, 1.0, 1.0], [1.001, 0.999])
ADVANTAGES = (1.0, -1.0, -0.5, 0.0)


@pytest.fixture
def sequences() -> list[TrainingSample]:
    return [
        TrainingSample([1], [2] * len(ratios), advantage, torch.full((len(ratios),), ROLLOUT), torch.tensor(ratios).log() + ROLLOUT)
        for ratios, advantage in zip(RATIOS, ADVANTAGES, strict=True)
    ]


def by_hand(kind: str, ratios: list[float]) -> list[float]:
    """The table of megatron_rl.algorithm.importance_weights with its default bounds."""
    product = math.prod(ratios)
    return {
        "tis": [min(q, 2.0) for q in ratios],
        "sequence_tis": [min(product, 2.0)] * len(ratios),
        "icepop": [q if 0.5 <= q <= 5.0 else 0.0 for q in ratios],
        "sequence_mask": [float(0.5 <= product <= 2.0)] * len(ratios),
        "token_veto": [float(min(ratios) >= 1e-4)] * len(ratios),
        "geometric_mask": [float(0.99 <= product ** (1 / len(ratios)) <= 1.01)] * len(ratios),
    }[kind]


def test_several_corrections_multiply(sequences):
    """A mask and a weight, as slime and verl put them together; a token of q = 0.1 vetoes its answer."""
    config = AlgorithmConfig(correction=["sequence_mask", "tis", "token_veto"], correction_veto=0.2, correction_cap=1.1)
    assert (config.correction_low, config.correction_high) == (0.5, 2.0)
    metrics = assign_corrections(sequences, config)
    for sequence, ratios in zip(sequences, RATIOS, strict=True):
        keep = 0.5 <= math.prod(ratios) <= 2.0 and min(ratios) >= 0.2
        assert sequence.importance_weights.tolist() == pytest.approx([keep * min(q, 1.1) for q in ratios], abs=1e-6)
    assert metrics["correction/touched_negative"] == pytest.approx((1 + 4) / 6)


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
@pytest.mark.parametrize("kinds", [["geometric_mask", "sequence_tis"], ["sequence_mask", "tis"], ["token_veto", "icepop"]])
def test_together_they_are_finite_for_hopeless_ratios_and_one_token_answers(kinds, shift):
    samples = [TrainingSample([1], [2], 1.0, torch.zeros(1), torch.full((1,), shift)), TrainingSample([1], [], 1.0)]
    samples.append(TrainingSample([1], [2, 2], -1.0, torch.zeros(2), torch.tensor([shift, 0.0])))
    assign_corrections(samples, AlgorithmConfig(correction=kinds))
    assert [sample.importance_weights.tolist() for sample in samples] == [[0.0], [], [0.0, float(kinds[0] == "token_veto" and shift > 0)]]


TOUCHED = {"tis": (1 / 3, 1 / 6), "sequence_tis": (0, 0), "icepop": (1 / 3, 2 / 6), "geometric_mask": (1, 1)}
TOUCHED |= {"sequence_mask": (0, 0), "token_veto": (0, 0)}  # shares of the tokens of positive and of negative advantage


@pytest.mark.parametrize("kind", TOUCHED)
def test_weights_and_their_statistics_by_sign_of_the_advantage(kind, sequences):
    """float32 log-probs near -2: 1e-6 is a few roundings."""
    metrics = assign_corrections(sequences, AlgorithmConfig(correction=kind))
    weights = [by_hand(kind, ratios) for ratios in RATIOS]
    for sequence, expected in zip(sequences, weights, strict=True):
        assert sequence.importance_weights.tolist() == pytest.approx(expected, abs=1e-6)
        assert not sequence.importance_weights.requires_grad
    for name, members in (("positive", [0]), ("negative", [1, 2])):
        flat = [value for member in members for value in weights[member]]
        assert metrics[f"correction/mean_{name}"] == pytest.approx(sum(flat) / len(flat), abs=1e-6)
        assert metrics[f"correction/max_{name}"] == pytest.approx(max(flat), abs=1e-6)
    assert (metrics["correction/touched_positive"], metrics["correction/touched_negative"]) == pytest.approx(TOUCHED[kind])


def test_equal_log_probs_need_no_correction_and_hopeless_ones_are_finite(sequences):
    """What unified precision aims at: all weights are 1, none is touched."""
    for sequence in sequences:
        sequence.old_logprobs = sequence.rollout_logprobs.clone()
    for kind in TOUCHED:
        metrics = assign_corrections(sequences, AlgorithmConfig(correction=kind))
        weights = {name: value for name, value in metrics.items() if "mean" in name or "max" in name}
        assert len(weights) == 4 and set(weights.values()) == {1.0}
        assert metrics["correction/touched_positive"] == metrics["correction/touched_negative"] == 0
    sequences[0].old_logprobs = sequences[0].rollout_logprobs + 1000.0  # exp() overflows; a capped or masked weight does not
    for kind, weight in zip(TOUCHED, (2.0, 2.0, 0.0, 0.0, 0.0, 1.0), strict=True):
        assign_corrections(sequences, AlgorithmConfig(correction=kind))
        assert sequences[0].importance_weights.tolist() == [weight] * 3


def test_without_correction_every_weight_is_one_also_with_the_engines_policy_as_the_old_one(sequences):
    assert assign_corrections(sequences, AlgorithmConfig()) == {}
    for batch in make_micro_batches(sequences, 10):
        assert torch.equal(batch.importance_weights, batch.mask)
    assign_corrections(sequences, AlgorithmConfig(old_policy="engine"))
    assert all(torch.equal(sequence.old_logprobs, sequence.rollout_logprobs) for sequence in sequences)


@pytest.mark.parametrize("kind", TOUCHED)
def test_a_ratio_that_is_no_number_is_refused_by_name(kind, sequences):
    """NaN is neither below a lower bound nor above an upper one."""
    sequences[2].old_logprobs = sequences[2].old_logprobs.clone()
    sequences[2].old_logprobs[1:3] = math.nan
    with pytest.raises(RunError, match=f"correction {kind}: 2 tokens have no ratio of trainer to engine"):
        assign_corrections(sequences, AlgorithmConfig(correction=kind))


def test_small_weights_of_whole_sequences_are_warned_of_once(sequences, caplog, monkeypatch):
    monkeypatch.setattr(importance_weights, "_warned", set())
    for sequence in sequences:
        sequence.old_logprobs = sequence.rollout_logprobs - 1.5
    for kind in ("tis", "sequence_tis", "sequence_tis"):
        assign_corrections(sequences, AlgorithmConfig(correction=kind))
    assert [record.message for record in caplog.records] == [
        "correction sequence_tis: the mean weight of positive advantages is 0.011; it falls with the length of responses"
    ]


def make_samples(count: int = 12) -> list[TrainingSample]:
    source = random.Random(1)
    samples = []
    for number in range(count):
        length = source.choice((1, 2, 7, 30))
        old = torch.tensor([source.uniform(-6, 0) for _ in range(length)])
        samples.append(TrainingSample([1], [2] * length, source.choice((-2.0, 0.0, 1.0, 3.0)), old_logprobs=old, number=number))
    samples[3].masked = samples[5].excluded = True
    samples[3].advantage, samples[5].advantage = 50.0, -50.0  # what is left out moves no mean
    return samples


def list_covariances(samples: list[TrainingSample]) -> dict[tuple[int, int], float]:
    learning = [sample for sample in samples if not (sample.masked or sample.excluded)]
    pairs = {(s.number, place): (old, s.advantage) for s in learning for place, old in enumerate(s.old_logprobs.tolist())}
    mean_old, mean_advantage = (sum(pair[index] for pair in pairs.values()) / len(pairs) for index in (0, 1))
    return {place: (old - mean_old) * (advantage - mean_advantage) for place, (old, advantage) in pairs.items()}


def list_chosen(samples: list[TrainingSample]) -> set[tuple[int, int]]:
    return {(sample.number, place) for sample in samples for place, flag in enumerate(sample.high_covariance.tolist()) if flag}


def mark_on_replicas(parts: list[list[TrainingSample]], config: AlgorithmConfig, version: int = 1) -> dict[str, float]:
    """Each replica in turn, the others' values known from passes before: as many passes as there are collectives."""
    said: list[list[Any]] = []
    while True:
        heard: list[list[Any]] = []
        finished = 0
        for part in parts:
            calls: list[Any] = []

            def exchange(own: Any, calls: list[Any] = calls) -> list[Any]:
                calls.append(own)
                if len(calls) > len(said):
                    raise StopIteration
                return said[len(calls) - 1]

            try:
                metrics = mark_high_covariance(part, config, version, lambda totals, ask=exchange: Totals.merge(ask(totals)), exchange)
                finished += 1
            except StopIteration:
                heard.append(calls[-1:])
        if finished == len(parts):
            return metrics
        said.append([own for (own,) in heard])


@pytest.mark.parametrize("ratio", [1e-6, 0.05, 0.5, 1.0])
def test_kl_cov_chooses_the_highest(ratio):
    samples = make_samples()
    covariances = list_covariances(samples)
    metrics = mark_high_covariance(samples, AlgorithmConfig(loss="kl_cov", cov_ratio=ratio), version=4)
    count = max(int(ratio * len(covariances)), 1)
    assert list_chosen(samples) == set(sorted(covariances, key=lambda place: -covariances[place])[:count])
    assert metrics["covariance/chosen"] == pytest.approx(count / len(covariances))
    assert metrics["covariance/mean"] == pytest.approx(sum(covariances.values()) / len(covariances), rel=1e-6)


@pytest.mark.parametrize("ratio", [1e-6, 0.1, 1.0])
def test_clip_cov_draws_among_those_within_the_bounds(ratio):
    samples = make_samples()
    within = {place for place, value in list_covariances(samples).items() if 0.5 <= value <= 4}
    config = AlgorithmConfig(loss="clip_cov", cov_ratio=ratio, clip_cov_low=0.5, clip_cov_high=4)
    draws = []
    for version in (1, 1, 2):
        mark_high_covariance(samples, config, version)
        draws.append(list_chosen(samples))
    count = max(int(ratio * len(list_covariances(samples))), 1)
    assert all(draw <= within and len(draw) == min(count, len(within)) for draw in draws)
    assert draws[0] == draws[1] and (draws[0] != draws[2]) == (len(draws[0]) < len(within))


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_replicas_choose_what_one_would(loss):
    config, alone = AlgorithmConfig(loss=loss, cov_ratio=0.1), make_samples()
    metrics = mark_high_covariance(alone, config, 1)
    for cut in (1, 6, 11):
        samples = make_samples()
        shared = mark_on_replicas([samples[:cut], samples[cut:]], config)
        assert list_chosen(samples) == list_chosen(alone) and shared == pytest.approx(metrics)


def test_nothing_is_chosen_where_all_are_alike_or_the_loss_needs_none():
    samples = [TrainingSample([1], [2, 3], 1.0, old_logprobs=torch.tensor([-1.0, -1.0]), number=number) for number in range(2)]
    mark_high_covariance(samples, AlgorithmConfig(loss="clip_cov"), 1)
    assert not list_chosen(samples)
    assert mark_high_covariance(samples, AlgorithmConfig(), 1) == {}


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
    in_loops = CalibrationTokens(tokens.quantized, tokens.exact, tokens.advantages[::per].repeat_interleave(per), correction * engine.exp())
    assert clip.bounds == pytest.approx(move_bounds(REFERENCE, find_target_bounds(in_loops, REFERENCE)), abs=1e-12)
    assert clip.bounds != REFERENCE
    assert (1 - clip.config.clip_low, 1 + clip.config.clip_high) == pytest.approx(clip.bounds)


Rows = list[list[float]]


def make_sample(old: list[float], advantage: float, **kwargs: torch.Tensor) -> TrainingSample:
    return TrainingSample([1], [2] * len(old), advantage, old_logprobs=torch.tensor(old), reference_logprobs=torch.tensor(old), **kwargs)


def run(config: AlgorithmConfig, samples: list[TrainingSample], logprobs: Rows) -> tuple[float, Rows]:
    """(loss, gradient by sample) of float32 tensors, as the trainer has them."""
    (batch,) = make_micro_batches(samples, 10_000)
    values = torch.zeros_like(batch.mask)
    values[0, batch.mask[0] == 1] = torch.tensor([value for row in logprobs for value in row])
    values.requires_grad_()
    loss, _ = PolicyLoss(config)(values, batch)
    loss.backward()
    return loss.item(), [part.tolist() for _, part in batch.split_by_sample(values.grad, samples)]


@pytest.mark.parametrize("settings", [{}, {"dual_clip": 3.0}, {"name": "gspo"}, {"name": "gspo", "correction": "tis"}, {"name": "cispo"}])
@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
@pytest.mark.parametrize("shift", [1000.0, -1000.0, 88.8, -88.8, 21.0, -21.0])
@pytest.mark.parametrize("length", [1, 3])
def test_any_ratio_has_a_finite_loss_and_gradient_by_the_formula(settings, advantage, shift, length):
    """In float64, by Python's floats; the exponent is bounded where the docs say so."""
    config = AlgorithmConfig(aggregate="token", **settings)
    loss, (gradient,) = run(config, [make_sample([-1.0] * length, advantage)], [[-1.0 + shift] * length])
    logprob, bounded = -1.0 + shift, math.exp(min(max(shift, -20.0), 20.0))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.loss == "cispo":
        weight = min(max(math.exp(min(shift, 100.0)), low), high)
        expected, slope = -weight * advantage * logprob, -weight * advantage
    else:
        expected = -min(bounded * advantage, min(max(bounded, low), high) * advantage)
        expected = min(expected, -config.dual_clip * advantage) if config.dual_clip and advantage < 0 else expected
        slope = 0.0
    assert loss == pytest.approx(length * expected, rel=1e-5)
    assert gradient == pytest.approx([slope] * length, rel=1e-5)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "clip_cov", "kl_cov"])
@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
@pytest.mark.parametrize("shift", [1000.0, -1000.0, 88.8, -88.8, 21.0, 1.0, -0.01])
def test_any_ratio_is_finite_for_bounds_on_divergence_and_entropy(loss, advantage, shift):
    """Three tokens, the second chosen for its covariance; the first of probability 1 before."""
    sample = make_sample([0.0, -1.0, -1.0], advantage, high_covariance=torch.tensor([False, True, False]))
    total, (gradient,) = run(AlgorithmConfig(loss=loss), [sample], [[min(shift, 0.0), -1.0 + shift, -1.0 + shift]])
    losses, slopes = [], []
    for old, new, chosen in ((0.0, min(shift, 0.0), False), (-1.0, -1.0 + shift, True), (-1.0, -1.0 + shift, False)):
        moved, ratio = new - old, math.exp(min(max(new - old, -20.0), 20.0))
        if loss in ("dppo_tv", "dppo_kl"):
            p, q = math.exp(min(new, 0.0)), math.exp(old)
            others = 0.0 if q == 1 else (1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf
            divergence = abs(p - q) if loss == "dppo_tv" else (q * (old - min(new, 0.0)) + others)
            removed = moved * advantage > 0 and divergence > 0.2
            slope = 0.0 if removed else -min(math.exp(min(moved, 90.0)), 20.0) * advantage
            losses.append(slope * new)
        elif loss == "clip_cov":
            bounded = min(max(ratio, 0.8), 1.2)
            value = -min(ratio * advantage, bounded * advantage)
            removed = chosen or abs(moved) > 20 or value != -ratio * advantage
            slope = 0.0 if removed else -ratio * advantage
            losses.append(0.0 if chosen else value)
        else:
            slope = (0.0 if abs(moved) > 20 else -ratio * advantage) + (math.copysign(1.0, moved) if chosen and moved else 0.0)
            losses.append(-ratio * advantage + (abs(moved) if chosen else 0.0))
        slopes.append(slope)
    assert total == pytest.approx(sum(losses), rel=1e-4, abs=1e-6)
    assert gradient == pytest.approx(slopes, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("difference", [1000.0, 88.8, 20.0, 10.0, 3.0, 0.0, -3.0, -20.0, -1000.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_any_difference_is_finite(kind, difference):
    """k3 had a gradient of 4.9e8 at 20, and of infinity from 88.8 on."""
    d = torch.tensor(difference, requires_grad=True)
    value = KL_ESTIMATORS[kind](d)
    value.backward()
    bounded = min(difference, 10.0)
    expected = {"k1": -difference, "k2": difference**2 / 2, "k3": math.exp(bounded) - bounded - 1}[kind]
    slope = {"k1": -1.0, "k2": difference, "k3": (difference <= 10) * math.expm1(bounded)}[kind]
    assert (value.item(), d.grad.item()) == (pytest.approx(expected, rel=1e-5, abs=1e-6), pytest.approx(slope, rel=1e-5, abs=1e-6))


@pytest.mark.parametrize("advantage", [1.0, -0.5])
@pytest.mark.parametrize("kind, weights", [("tis", [2.0, 0.5, 1.0, 1.0]), ("icepop", [0.0, 0.5, 1.0, 1.0])])
def test_gspo_gives_each_token_the_gradient_of_its_own_correction(kind, weights, advantage):
    """arXiv 2507.18071, eq. 17: tokens of weight c_t have c_t s A, none outside the clip. One that IcePop masked kept a share of it."""
    config = AlgorithmConfig(name="gspo", aggregate="token", correction=kind, clip_low=0.2, clip_high=0.2)
    old = [-1.0, -2.0, -1.5, -3.0]
    ratios = torch.tensor([8.0, 0.5, 1.0, 1.0])
    sample = make_sample(old, advantage, rollout_logprobs=torch.tensor(old) - ratios.log())
    assign_corrections([sample], config)
    now = [-1.1, -1.9, -1.45, -3.02]
    _, (gradient,) = run(config, [sample], [now])
    s = math.exp(sum(new - before for new, before in zip(now, old, strict=True)) / len(old))
    assert 0.8 < s < 1.2 and gradient == pytest.approx([-weight * s * advantage for weight in weights], rel=1e-5)
    assert kind == "tis" or gradient[0] == 0.0
