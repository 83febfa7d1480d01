"""Random training samples with any of their columns, and bitwise comparison of samples and of nested results."""

from dataclasses import replace

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.types import KeptTokens

_TENSORS = ("prompt_ids", "response_ids", "rollout_logprobs", "routed_experts", "version_lags", "response_mask")
_NUMBERS = ("number", "advantage", "reward", "excluded", "masked", "loss_weight")


def with_random_routing(batch, experts, top_k, layers=2):
    """Return the batch with random routing."""
    generator = torch.Generator().manual_seed(3)

    def record(tokens):
        return torch.rand(tokens - 1, layers, experts, generator=generator).topk(top_k).indices.byte()

    return [replace(sequence, routed_experts=record(sequence.length)) for sequence in batch]


def make_samples(shapes, with_columns=(), seed=0):
    """Return samples with (prompt, response) lengths `shapes`. `with_columns` names columns: "mask", "experts" or "wide experts", "kept"
    (for every second sample), "lags"."""
    source = np.random.default_rng(seed)

    def draw(bound, dtype, *shape):
        return torch.from_numpy(source.integers(0, bound, shape).astype(dtype))

    samples = []
    for number, (prompt, answer) in enumerate(shapes):
        mask = draw(2, bool, answer) if "mask" in with_columns else torch.ones(answer, dtype=torch.bool)
        sampled = int(mask.sum())
        sample = TrainingSample(
            draw(200_000, np.int32, prompt), draw(200_000, np.int32, answer), float(source.normal()), number=number, reward=float(number)
        )
        sample.excluded, sample.masked, sample.loss_weight = number % 3 == 2, number % 4 == 1, 0.5 + number
        sample.rollout_logprobs = torch.from_numpy(source.normal(size=sampled).astype(np.float32))
        if "mask" in with_columns:
            sample.response_mask = mask
        if "lags" in with_columns:
            sample.version_lags = draw(5, np.uint8, sampled)
        if "experts" in with_columns or "wide experts" in with_columns:
            wide = "wide experts" in with_columns
            sample.routed_experts = draw(300 if wide else 200, np.int16 if wide else np.uint8, prompt + answer - 1, 3, 2)
        if "kept" in with_columns and number % 2:
            counts = source.integers(1, 4, sampled).astype(np.int32)
            sample.kept_tokens = KeptTokens(counts, source.integers(0, 99, counts.sum()).astype(np.int32))
        samples.append(sample)
    return samples


def assert_equal_samples(actual, expected):
    """Compare everything that is sent: values, dtypes and shapes. Empty columns may have any dtype."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert [getattr(one, name) for name in _NUMBERS] == [getattr(other, name) for name in _NUMBERS]
        for name in _TENSORS:
            values, wanted = getattr(one, name), getattr(other, name)
            assert len(values) == len(wanted) and (not wanted.numel() or (values.dtype == wanted.dtype and values.equal(wanted)))
        assert (one.kept_tokens is None) == (other.kept_tokens is None)
        if one.kept_tokens is not None and other.kept_tokens is not None:
            assert (one.kept_tokens.counts == other.kept_tokens.counts).all() and (one.kept_tokens.ids == other.kept_tokens.ids).all()


def assert_same(ours, theirs, unlike=frozenset(), name=""):
    """Compare nested dictionaries, lists, tensors and numbers. Entries with keys in `unlike` may differ."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - unlike:
            assert_same(ours[key], theirs[key], unlike, f"{name} {key}")
    elif isinstance(theirs, list):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, unlike, f"{name} {number}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), name
    else:
        assert ours == theirs, name
