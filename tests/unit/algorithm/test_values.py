"""The critic's side of PPO: GAE against its definition as a double sum in plain Python, whitening and the KL term per token; the value loss
against plain arithmetic and finite differences."""

import math
import random
import statistics
from collections.abc import Iterator

import pytest
import torch

from megatron_rl.algorithm.gae import assign_token_advantages, estimate_advantages
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.value_loss import ValueLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

GAE = AlgorithmConfig(advantage="gae", gamma=0.97, lam=0.9)


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_(t+l)."""
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, [*values, 0.0][1:], strict=True)]
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def draw(length: int, seed: int, turns: bool = False, **fields: object) -> TrainingSample:
    """An answer of `length` sampled tokens; with `turns` an environment writes three tokens behind each of them but the last, and one."""
    generator = torch.Generator().manual_seed(seed)
    mask = [True, False, False, False] * (length - 1) + [True, False] if turns else [True] * length
    old, reference, values = torch.randn(3, length, generator=generator)
    return TrainingSample(
        [1, 2], [3] * len(mask), response_mask=mask if turns else [], reward=float(seed), values=values, old_logprobs=old,
        reference_logprobs=reference, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.97, 0.9), (0.5, 0.0)])
def test_gae_is_the_sum_of_its_definition(gamma, lam):
    lengths, generator = [3, 1, 7, 1, 0, 2], torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    advantages, returns = estimate_advantages(rewards, values, lengths, gamma, lam)
    for own, *of_sample in zip(advantages.split(lengths), rewards.split(lengths), values.split(lengths), strict=True):
        assert own.tolist() == pytest.approx(by_definition(*(part.tolist() for part in of_sample), gamma, lam), rel=1e-13)
    assert torch.equal(returns, advantages + values)
    if lam == gamma == 1:  # what is left of the reward, less the value
        assert returns[:3].tolist() == pytest.approx(rewards[:3].flip(0).cumsum(0).flip(0).tolist(), rel=1e-13)


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_whitened_advantages_and_returns_of_ragged_answers(kl_coef):
    config = GAE.model_copy(update={"kl_coef": kl_coef, "kl_in": "reward", "kl_estimator": "k1"})
    samples = [draw(4, 1), draw(1, 2), draw(5, 3, turns=True), draw(1, 4, turns=True), draw(3, 5, loss_weight=0.0, excluded=True)]
    metrics = assign_token_advantages(samples, config)
    plain, returns, kl = [], [], []
    for sample in samples:
        estimates = (sample.old_logprobs - sample.reference_logprobs).double()  # k1
        rewards = [-kl_coef * float(x) for x in estimates]
        rewards[-1] += sample.reward
        values = sample.values.double().tolist()
        plain.append(by_definition(rewards, values, config.gamma, config.lam))
        returns.append([a + v for a, v in zip(plain[-1], values, strict=True)])
        kl += estimates.tolist() if sample.loss_weight else []
    counted = [a for part in plain[:4] for a in part]
    mean, std = statistics.fmean(counted), math.sqrt(statistics.variance(counted) + 1e-8)
    for sample, own, of_sample in zip(samples[:4], plain, returns, strict=False):
        assert sample.token_advantages.tolist() == pytest.approx([(a - mean) / std for a in own], rel=1e-6)
        assert sample.returns.tolist() == pytest.approx(of_sample, rel=1e-6)
        assert sample.advantage == pytest.approx(statistics.fmean(sample.token_advantages.tolist()), rel=1e-5)
    assert samples[4].token_advantages.tolist() == [0.0] * 3 and samples[4].advantage == 0
    returned = [value for part in returns[:4] for value in part]
    errors = [a for part in plain[:4] for a in part]  # return - value
    assert metrics["critic/explained_variance"] == pytest.approx(1 - statistics.variance(errors) / statistics.variance(returned), rel=1e-9)
    assert metrics["critic/returns_mean"] == pytest.approx(statistics.fmean(returned), rel=1e-12)
    assert metrics.get("reward/kl", 0) == pytest.approx(statistics.fmean(kl) if kl_coef else 0, rel=1e-6)


def test_what_an_environment_wrote_changes_nothing():
    alone, with_turns = [draw(4, 1), draw(3, 2)], [draw(4, 1, turns=True), draw(3, 2, turns=True)]
    assert assign_token_advantages(alone, GAE) == assign_token_advantages(with_turns, GAE)
    for sample, other in zip(alone, with_turns, strict=True):
        assert torch.equal(sample.token_advantages, other.token_advantages)
    (row,) = make_micro_batches(with_turns[:1], 64)
    assert row.advantages[row.mask == 1].tolist() == alone[0].token_advantages.tolist()
    assert row.returns[row.mask == 1].tolist() == alone[0].returns.tolist() and not row.values[row.mask == 0].any()


def test_a_samples_bits_do_not_depend_on_which_others_its_replica_has():
    lengths, rows = [1 + 3 * number % 8 for number in range(8)], list[torch.Tensor]()

    def keep(part: torch.Tensor) -> torch.Tensor:
        rows.append(part)
        return part.sum(0)

    samples = [draw(length, number) for number, length in enumerate(lengths)]
    assign_token_advantages(samples, GAE, keep)
    for share in ([5, 0, 6], [1, 2, 3, 4, 7]):
        own, passes = [draw(lengths[number], number) for number in share], iter(rows)

        def sum_all(part: torch.Tensor, share: list[int] = share, passes: Iterator[torch.Tensor] = passes) -> torch.Tensor:
            of_all = next(passes)
            assert torch.equal(part, of_all[share])
            return of_all.sum(0)

        assign_token_advantages(own, GAE, sum_all)
        for number, sample in zip(share, own, strict=True):
            assert torch.equal(sample.token_advantages, samples[number].token_advantages)


def test_equal_returns_have_no_explained_variance_and_nothing_counted_is_all_zero():
    assert [len(part) for part in estimate_advantages(*torch.empty(2, 0).double(), [], 1.0, 1.0)] == [0, 0]
    assert assign_token_advantages([], GAE) == {"critic/values_mean": 0.0, "critic/returns_mean": 0.0}
    flat = [TrainingSample([1], [2, 2], reward=1.0, values=torch.tensor([0.2, 0.4]), loss_weight=weight) for weight in (1.0, 1.0)]
    metrics = assign_token_advantages(flat, AlgorithmConfig(advantage="gae"))
    assert "critic/explained_variance" not in metrics and metrics["critic/returns_mean"] == 1
    assert flat[0].token_advantages.tolist() == pytest.approx([math.sqrt(0.75), -math.sqrt(0.75)], rel=1e-6)
    masked = [draw(3, 1, loss_weight=0.0, masked=True)]
    assert assign_token_advantages(masked, GAE)["critic/values_mean"] == 0 and not masked[0].token_advantages.any()


CLIP = 0.3


def samples() -> list[TrainingSample]:
    source = random.Random(3)
    masks = [[True] * 4, [True], [True, False, False, True, True], [True] * 3]
    made = [
        TrainingSample(
            [1, 2], [3] * len(mask), response_mask=mask if not all(mask) else [],
            values=torch.tensor([source.uniform(-1, 1) for _ in range(sum(mask))]),
            returns=torch.tensor([source.uniform(-2, 2) for _ in range(sum(mask))]),
        )
        for mask in masks
    ]  # fmt: skip
    made[3].excluded = True
    return made


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("max_tokens", [64, 6])
def test_the_loss_is_the_clipped_squared_error_over_the_policys_tokens_however_packed(aggregate, max_tokens):
    batch, source = samples(), random.Random(5)
    assign_loss_weights(batch, aggregate, longest=8)
    tokens = sum(sample.sampled_count for sample in batch)
    values = [[source.uniform(-2, 2) for _ in range(sample.sampled_count)] for sample in batch]
    expected, clipped, losses = 0.0, 0, list[list[float]]()
    for sample, of_sample in zip(batch, values, strict=True):
        losses.append([])
        for value, old, target in zip(of_sample, sample.values.tolist(), sample.returns.tolist(), strict=True):
            bounded = min(max(value, old - CLIP), old + CLIP)
            plain, other = (value - target) ** 2, (bounded - target) ** 2
            losses[-1].append(0.5 * max(plain, other))
            clipped += other > plain
    counted = losses[:3]
    expected = {
        "token": sum(map(sum, counted)) / sum(map(len, counted)),
        "sequence": sum(sum(part) / len(part) for part in counted) / 3,
        "constant": sum(map(sum, counted)) / (3 * 8),
    }[aggregate]
    total, touched = 0.0, 0.0
    for row in make_micro_batches(batch, max_tokens):
        predicted = torch.full_like(row.mask, math.nan)  # elsewhere anything may stand
        for index, places in row.split_by_sample(torch.arange(row.mask.numel()).view(1, -1), batch):
            predicted[0, places] = torch.tensor(values[index])
        loss, metrics = ValueLoss(CLIP)(predicted, row)
        total, touched = total + float(loss), touched + float(metrics["critic/clip_fraction"])
    assert total / tokens == pytest.approx(expected, rel=1e-6)
    assert touched == clipped > 2


def test_gradients_are_those_of_finite_differences():
    batch = samples()
    (row,) = make_micro_batches(batch, 64)
    for name in ("mask", "values", "returns", "loss_weights"):
        setattr(row, name, getattr(row, name).double())
    values = (torch.rand(row.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4 - 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ValueLoss(CLIP)(x, row)[0], (values,))
    ValueLoss(CLIP)(values, row)[0].backward()
    assert not values.grad[row.mask == 0].any() and values.grad[row.mask == 1].count_nonzero() >= 3
