"""Corrections for the engine's mismatch: weights by the formulas token by token, who gets them, what is reported."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithm import importance_weights
from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import RunError

ROLLOUT = -2.0
RATIOS = ([1.0, 3.0, 0.4], [0.9, 1.2], [6.0, 0.1, 1.0, 1.0], [1.001, 0.999])
ADVANTAGES = (1.0, -1.0, -0.5, 0.0)


@pytest.fixture
def sequences() -> list[TrainingSample]:
    return [
        TrainingSample(
            [1],
            [2] * len(ratios),
            advantage,
            rollout_logprobs=torch.full((len(ratios),), ROLLOUT),
            old_logprobs=torch.tensor([ROLLOUT + math.log(ratio) for ratio in ratios]),
        )
        for ratios, advantage in zip(RATIOS, ADVANTAGES, strict=True)
    ]


def by_hand(kind: str) -> list[list[float]]:
    """The table of megatron_rl.algorithm.importance_weights with its default bounds."""
    result = []
    for ratios in RATIOS:
        product = math.prod(ratios)
        result.append(
            {
                "tis": [min(q, 2.0) for q in ratios],
                "sequence_tis": [min(product, 2.0)] * len(ratios),
                "icepop": [q if 0.5 <= q <= 5.0 else 0.0 for q in ratios],
                "sequence_mask": [float(0.5 <= product <= 2.0)] * len(ratios),
                "token_veto": [float(min(ratios) >= 1e-4)] * len(ratios),
                "geometric_mask": [float(0.99 <= product ** (1 / len(ratios)) <= 1.01)] * len(ratios),
            }[kind]
        )
    return result


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


KINDS = ["tis", "sequence_tis", "icepop", "geometric_mask", "sequence_mask", "token_veto"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_their_statistics_by_sign_of_the_advantage(kind, sequences):
    """float32 log-probs near -2: 1e-6 is a few roundings."""
    metrics = assign_corrections(sequences, AlgorithmConfig(correction=kind))
    weights = by_hand(kind)
    for sequence, expected in zip(sequences, by_hand(kind), strict=True):
        assert sequence.importance_weights.tolist() == pytest.approx(expected, abs=1e-6)
        assert not sequence.importance_weights.requires_grad
    for name, members in (("positive", [0]), ("negative", [1, 2])):
        flat = [value for member in members for value in weights[member]]
        assert metrics[f"correction/mean_{name}"] == pytest.approx(sum(flat) / len(flat), abs=1e-6)
        assert metrics[f"correction/max_{name}"] == pytest.approx(max(flat), abs=1e-6)
    touched = {
        "tis": (1 / 3, 1 / 6),
        "sequence_tis": (0, 0),
        "icepop": (1 / 3, 2 / 6),
        "geometric_mask": (1, 1),
        "sequence_mask": (0, 0),
        "token_veto": (0, 0),
    }[kind]
    assert (metrics["correction/touched_positive"], metrics["correction/touched_negative"]) == pytest.approx(touched)


def test_equal_log_probs_need_no_correction_and_hopeless_ones_are_finite(sequences):
    """What unified precision aims at: all weights are 1, none is touched."""
    for sequence in sequences:
        sequence.old_logprobs = sequence.rollout_logprobs.clone()
    for kind in KINDS:
        metrics = assign_corrections(sequences, AlgorithmConfig(correction=kind))
        weights = {name: value for name, value in metrics.items() if "mean" in name or "max" in name}
        assert len(weights) == 4 and set(weights.values()) == {1.0}
        assert metrics["correction/touched_positive"] == metrics["correction/touched_negative"] == 0
    sequences[0].old_logprobs = sequences[0].rollout_logprobs + 1000.0  # exp() overflows; a capped or masked weight does not
    for kind, weight in zip(KINDS, (2.0, 2.0, 0.0, 0.0, 0.0, 1.0), strict=True):
        assign_corrections(sequences, AlgorithmConfig(correction=kind))
        assert sequences[0].importance_weights.tolist() == [weight] * 3


def test_without_correction_every_weight_is_one_also_with_the_engines_policy_as_the_old_one(sequences):
    assert assign_corrections(sequences, AlgorithmConfig()) == {}
    for batch in make_micro_batches(sequences, 10):
        assert torch.equal(batch.importance_weights, batch.mask)
    assign_corrections(sequences, AlgorithmConfig(old_policy="engine"))
    assert all(torch.equal(sequence.old_logprobs, sequence.rollout_logprobs) for sequence in sequences)


def test_micro_batches_carry_the_weights(sequences):
    assign_corrections(sequences, AlgorithmConfig(correction="icepop"))
    for batch in make_micro_batches(sequences, 10):
        assert not (batch.importance_weights * (1 - batch.mask)).any()
        for index, part in batch.split_by_sample(batch.importance_weights, sequences):
            assert torch.equal(part, sequences[index].importance_weights)


@pytest.mark.parametrize("kind", KINDS)
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
