"""Serialization of samples is lossless for any piece size; totals of parts equal totals of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.samples import assert_equal_samples, make_samples

from megatron_rl.batch.sample_bytes import SampleBytes, read_samples
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), max_size=6)


@given(SHAPES, st.sets(st.sampled_from(["mask", "experts", "wide experts", "kept", "lags"])), st.integers(1, 400))
def test_serialization_is_lossless(shapes, with_columns, piece_bytes):
    samples = make_samples(shapes, with_columns)
    sent = SampleBytes(samples)
    pieces = [piece.clone() for piece in sent.iterate(piece_bytes)]
    assert all(len(piece) == min(piece_bytes, sent.total) for piece in pieces[:-1]) and sum(map(len, pieces)) == sent.total
    data = torch.cat(pieces)
    received = read_samples(data)
    assert_equal_samples(received, samples)
    owners = {sample.response_ids.untyped_storage().data_ptr() for sample in received if len(sample.response_ids)}
    assert owners <= {data.untyped_storage().data_ptr()}, "nothing is copied"


def test_a_token_takes_eight_bytes_and_a_column_has_one_dtype():
    ids, logprobs = torch.zeros(10**5, dtype=torch.int32), torch.zeros(10**5)
    assert SampleBytes([TrainingSample(ids[:1], ids, rollout_logprobs=logprobs)]).total < 8.03 * 10**5
    with pytest.raises(ValueError, match="samples disagree on the dtype or shape of a column"):
        SampleBytes([TrainingSample(ids, ids, rollout_logprobs=values) for values in (logprobs, logprobs.double())])


@given(st.lists(st.floats(-100, 100, width=32), max_size=9), st.integers(0, 9))
def test_merged_totals_equal_the_totals_of_the_whole(values, cut):
    whole, *parts = (Totals() for _ in range(3))
    for totals, some in zip((whole, *parts), (values, values[:cut], values[cut:]), strict=True):
        totals.add("x", torch.tensor(some))
    merged = Totals.merge(parts)
    assert (merged.count("x"), merged.largest("x")) == (len(values), max(values, default=0.0))
    assert merged.mean("x") == pytest.approx(whole.mean("x"), rel=1e-12, abs=1e-12)
    assert merged.mean("x") == pytest.approx(np.mean(values) if values else 0.0, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_kept(order):
    totals = Totals()
    for value in order:
        totals.add("x", torch.tensor([value]))
    assert math.isnan(totals.largest("x")) and math.isnan(totals.mean("x"))
