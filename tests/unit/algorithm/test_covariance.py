"""The choice of tokens by covariance against plain loops in Python floats, whatever replica has which samples."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_rl.algorithm.covariance import mark_high_covariance
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig


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


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"clip_cov_low \(5.0\) must be less than clip_cov_high"):
        AlgorithmConfig(loss="clip_cov", clip_cov_low=5.0)
