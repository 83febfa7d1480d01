"""Tasks of workers travel as JSON and arrive with the types of their values."""

import json
import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rewards.foreign import Sample
from megatron_rl.types import Episode, Problem
from megatron_rl.workers import plain


def unfold(moment):
    """Return a time without `fold`, which ISO 8601 does not write."""
    return moment.replace(fold=0)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates()
    | st.datetimes().map(unfold) | st.times().map(unfold) | st.timedeltas() | st.decimals(allow_nan=False) | st.uuids()
    | st.sampled_from(["\0tuple", "\0", "\ud800"]),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.just("\0tuple"), inner),
)  # fmt: skip


@given(NESTED)
def test_values_arrive_as_they_are(value):
    read = plain.load(plain.dump(value))
    assert read == value and repr(read) == repr(value), "also with the same types"


@pytest.mark.parametrize("array", [
    np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(0.1), np.array([], np.float64), np.array(["a", "bc"]), np.array([True]),
    np.array(["2026-11-27"], "datetime64[s]"), np.arange(8, dtype=">i2")[::2],
])  # fmt: skip
def test_numpy(array):
    read = plain.load(plain.dump([array]))[0]
    assert type(read) is type(array) and read.dtype == array.dtype and np.array_equal(read, array)


def test_problems_and_samples():
    columns = {"when": datetime(2026, 11, 27, tzinfo=UTC), "price": Decimal("1.10"), "nan": math.nan, "id": UUID(int=7), "at": time(1, 2)}
    problem = Problem("a", "1+1=", "2", history=({"role": "user", "content": "x"},), pass_rate=0.5, columns=columns)
    text, read, sample = plain.load(plain.dump(("t", problem, Sample((1, 2), ["a"]))), (Problem, Sample))
    assert text == "t" and sample == Sample((1, 2), ["a"]) and math.isnan(read.columns["nan"])
    assert repr(read) == repr(problem)
    episode = Episode(**vars(problem), seed=3, turn=1, state=b"\x80\x04")
    assert repr(plain.load(plain.dump(episode), (Episode,))) == repr(episode)


@dataclass
class Other:
    x: int = 0


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), [print], 1j, date])
def test_other_objects_cannot_be_sent(value):
    with pytest.raises(TypeError, match="cannot be sent to a worker"):
        plain.dump([value])


def test_only_known_classes_are_made():
    with pytest.raises(ValueError, match="no type of a task"):
        plain.load(plain.dump(Other(1)), (Problem,))
    assert json.loads(plain.dump(timedelta(days=-1, microseconds=5))) == {"\0timedelta": "-1 0 5"}
