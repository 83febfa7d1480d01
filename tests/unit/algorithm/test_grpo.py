"""GRPO's advantages, loss, gradient and clip counts against the formulas, token by token in Python floats."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.advantages import compute_advantages as group_advantages
from megatron_rl.algorithm.kl import k3
from megatron_rl.algorithm.policy_loss import PolicyLoss as GRPOLoss
from megatron_rl.batch.micro_batch import MicroBatch, make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig


def advantages(rewards_G: list[float]) -> list[float]:
    return group_advantages(rewards_G, len(rewards_G))


quick = settings(max_examples=50, deadline=None, derandomize=True)
ALGORITHM = AlgorithmConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.05)


@quick
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_advantages_are_rewards_standardised_within_the_group(rewards_G):
    mean = math.fsum(rewards_G) / len(rewards_G)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards_G) / len(rewards_G))
    assert advantages(rewards_G) == pytest.approx([(reward - mean) / (std + 1e-6) for reward in rewards_G], abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equals_has_no_advantage(reward):
    assert advantages([reward] * 8) == pytest.approx([0.0] * 8, abs=1e-9)


def test_one_right_answer_among_four():
    """By hand: mean 1/4, population std sqrt(3)/4."""
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3, rel=1e-5)


def token_loss(logprob: float, old: float, reference: float, advantage: float, config: AlgorithmConfig) -> float:
    """The loss of one answer token as the docstring of megatron_rl.algorithm.losses.ppo states it."""
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    difference = reference - logprob
    return -min(ratio * advantage, clipped * advantage) + config.kl_coef * (math.exp(difference) - difference - 1)


@dataclasses.dataclass
class Case:
    """Sequences with known values, and the current log-prob of each answer token."""

    sequences: list[TrainingSample]
    logprobs: list[list[float]]

    def laid_out(self, batch: MicroBatch, elsewhere: float = -3.0) -> torch.Tensor:
        """float64 [1, t]: the current log-probs where `batch` has answer tokens, another number at all other positions."""
        found = torch.full(batch.mask.shape, elsewhere, dtype=torch.float64)
        for index, places in batch.iter_target_positions(self.sequences):
            found[0, places] = torch.tensor(self.logprobs[index], dtype=torch.float64)
        return found

    def tokens(self) -> list[tuple[float, float, float, float]]:
        """(log-prob, old, reference, advantage) of every answer token, as float32 holds them."""
        return [
            (logprob, old, reference, sequence.advantage)
            for sequence, logprobs in zip(self.sequences, self.logprobs, strict=True)
            for logprob, old, reference in zip(logprobs, sequence.old_logprobs.tolist(), sequence.reference_logprobs.tolist(), strict=True)
        ]


@pytest.fixture
def case() -> Case:
    """Ratios from far below to far above the clip, none within 0.01 of it, for advantages of both signs and zero."""
    source = random.Random(0)
    ratios = [0.3, 0.7, 0.75, 0.83, 0.95, 1.0, 1.1, 1.25, 1.31, 1.6, 2.5]
    sequences, logprobs = [], []
    for advantage in (1.5, -0.7, 0.0, -2.0, 0.4):
        length = source.randint(3, 11)
        old = torch.tensor([source.uniform(-4, -1) for _ in range(length)])
        reference = torch.tensor([source.uniform(-4, -1) for _ in range(length)])
        sequences.append(TrainingSample([7] * source.randint(1, 5), [9] * length, advantage, old, old, reference))
        logprobs.append([value + math.log(source.choice(ratios)) for value in old.tolist()])
    return Case(sequences, logprobs)


def in_float64(batch: MicroBatch) -> MicroBatch:
    names = ("mask", "advantages", "old_logprobs", "reference_logprobs")
    return dataclasses.replace(batch, **{name: getattr(batch, name).double() for name in names})


Result = tuple[float, dict[str, float], dict[int, list[float]]]


def run(case: Case, most: int, config: AlgorithmConfig = ALGORITHM, elsewhere: float = -3.0) -> Result:
    """(loss, metrics, gradient by sequence) summed over micro-batches of at most `most` tokens."""
    total, metrics, gradients = 0.0, {}, {}
    for batch in map(in_float64, make_micro_batches(rounded(case).sequences, most)):
        logprobs = case.laid_out(batch, elsewhere).requires_grad_()
        loss, sums = GRPOLoss(config)(logprobs, batch)
        loss.backward()
        total += loss.item()
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in sums.items()}
        assert not (logprobs.grad * (1 - batch.mask)).any(), "a token that is no answer has a gradient"
        gradients |= {index: part.tolist() for index, part in batch.split_by_sample(logprobs.grad, case.sequences)}
    return total, metrics, gradients


def rounded(case: Case) -> Case:
    """Advantages as float32 tensors hold them."""
    for sequence in case.sequences:
        sequence.advantage = torch.tensor(sequence.advantage).item()
    return case


@pytest.mark.parametrize("most", [1, 20, 1000])
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_the_loss_is_the_sum_over_answer_tokens_however_the_batch_is_cut(case, most, kl_coef):
    config = ALGORITHM.model_copy(update={"kl_coef": kl_coef})
    loss, metrics, _ = run(case, most, config)
    no_kl = config.model_copy(update={"kl_coef": 0.0})
    assert loss == pytest.approx(sum(token_loss(*token, config) for token in case.tokens()), rel=1e-12)
    assert metrics["loss/policy"] == pytest.approx(sum(token_loss(*token, no_kl) for token in case.tokens()), rel=1e-12)
    assert ("loss/kl" in metrics) == bool(kl_coef)
    if kl_coef:
        assert metrics["loss/kl"] == pytest.approx(sum(math.exp(r - p) - (r - p) - 1 for p, _, r, _ in case.tokens()), rel=1e-12)


def test_the_gradient_is_the_finite_difference_of_the_formula(case):
    _, _, gradients = run(case, 20)
    step = 1e-6
    expected = [
        (token_loss(logprob + step, *known, ALGORITHM) - token_loss(logprob - step, *known, ALGORITHM)) / (2 * step)
        for logprob, *known in case.tokens()
    ]
    got = [value for index in range(len(case.sequences)) for value in gradients[index]]
    assert got == pytest.approx(expected, abs=1e-7)


def test_clips_are_counted_by_the_sign_of_the_advantage_where_the_gradient_is_gone(case):
    config = ALGORITHM.model_copy(update={"kl_coef": 0.0})
    _, metrics, gradients = run(case, 25, config)
    gone = {index: sum(gradient == 0 for gradient in values) for index, values in gradients.items()}
    positive, negative = (
        sum(gone[index] for index, member in enumerate(case.sequences) if sign * member.advantage > 0) for sign in (1, -1)
    )
    assert positive > 0 and negative > 0
    assert (metrics["clip/positive"], metrics["clip/negative"]) == (positive, negative)


@pytest.mark.parametrize(
    "ratio, advantage, counts",
    [
        (1.29, 1.0, (1, 0)),
        (1.27, 1.0, (0, 0)),
        (0.1, 1.0, (0, 0)),
        (0.79, -1.0, (0, 1)),
        (0.81, -1.0, (0, 0)),
        (9.0, -1.0, (0, 0)),
        (9.0, 0.0, (0, 0)),
    ],
)
def test_each_side_of_the_clip(ratio, advantage, counts):
    before = torch.tensor([-2.0])
    case = Case([TrainingSample([1], [2], advantage, old_logprobs=before, reference_logprobs=before)], [[-2.0 + math.log(ratio)]])
    _, metrics, _ = run(case, 1)
    assert (metrics["clip/positive"], metrics["clip/negative"]) == counts


@pytest.mark.parametrize("elsewhere", [-3.0, 0.0, -80.0, -1000.0])
def test_what_is_no_answer_token_never_matters(case, elsewhere):
    """Prompt tokens and padding have log-probs too, and some are astronomically improbable to the policy."""
    expected, metrics, gradients = run(case, 1000)
    loss, other_metrics, other_gradients = run(case, 1000, elsewhere=elsewhere)
    assert loss == expected and other_metrics == metrics and other_gradients == gradients


@quick
@given(st.floats(-20, 20))
def test_k3_is_never_negative_and_zero_only_for_equals(difference):
    value = k3(torch.tensor(difference, dtype=torch.float64)).item()
    assert value == pytest.approx(math.exp(difference) - difference - 1, abs=1e-12)
    assert value >= 0
    assert value > 0 or abs(difference) < 1e-7


def test_k3_estimates_the_kl_divergence():
    """Its expectation under p is KL(p || q) exactly, here summed over a small vocabulary."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 20, generator=generator, dtype=torch.float64).log_softmax(-1)
    assert (p.exp() * k3(q - p)).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-12)
