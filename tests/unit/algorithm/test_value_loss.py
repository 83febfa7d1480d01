"""The value loss against plain arithmetic and finite differences, on packed answers of several turns."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.value_loss import ValueLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample

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
def test_the_loss_is_the_clipped_squared_error_over_the_policys_tokens(aggregate, max_tokens):
    """However the samples are packed."""
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


def test_an_answer_of_one_token_and_a_masked_row():
    one = TrainingSample([1], [2], values=torch.tensor([0.5]), returns=torch.tensor([2.0]))
    (row,) = make_micro_batches([one], 16)
    values = torch.where(row.mask == 1, 1.0, 0.0)
    assert float(ValueLoss(0.2)(values, row)[0]) == pytest.approx(0.5 * 1.3**2)  # the clipped value, 0.7, is further away
    one.loss_weight = 0.0
    (row,) = make_micro_batches([one], 16)
    assert float(ValueLoss(0.2)(values, row)[0]) == 0
