"""A step whose rollout disagrees with the trainer stops the run, or warns."""

import pytest

from megatron_rl.config.sync import SyncConfig
from megatron_rl.errors import RunError
from megatron_rl.training.mismatch import MISMATCH, MismatchBound

INF = float("inf")


@pytest.mark.parametrize(
    "given, exact, fine, too_much",
    [(None, True, 0.0, 1e-7), (None, False, 99.0, None), (0.5, True, 0.5, 0.6), (0.5, False, 0.5, float("nan")), (INF, True, 99.0, None)],
)
def test_the_bound_is_0_where_exactness_is_promised_and_else_what_is_given(given, exact, fine, too_much):
    bound = MismatchBound(SyncConfig(max_mismatch=given), exact, print)
    bound.check({MISMATCH[1]: fine})
    bound.check({})  # no token of the trainer's version
    if too_much is not None:
        line = r"^the mismatch of rollout and trainer is \S+ nats \(mismatch/abs_max\), above sync\.max_mismatch = 0(\.5)?: "
        with pytest.raises(RunError, match=line):
            bound.check({MISMATCH[1]: too_much})


def test_a_warning_is_given_once_until_the_mismatch_is_back():
    lines: list[str] = []
    bound = MismatchBound(SyncConfig(max_mismatch=0.1, on_mismatch="warn"), True, lines.append)
    for value in (0.0, 0.2, 0.3, 0.1, 0.4):
        bound.check({MISMATCH[1]: value})
    assert lines == [
        f"the mismatch of rollout and trainer is {value} nats (mismatch/abs_max), above sync.max_mismatch = 0.1" for value in (0.2, 0.4)
    ]
