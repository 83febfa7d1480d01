"""SIGTERM ends a run of one process at once; of several ranks each notes it and all stop where the loop asks."""

from __future__ import annotations

import signal

import pytest

from megatron_rl import stop


@pytest.fixture(autouse=True)
def own_handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    stop._asked = False


def test_a_run_of_one_process_unwinds_at_once():
    stop.listen(alone=True)
    with pytest.raises(SystemExit) as raised:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.code == 143


def test_ranks_stop_where_the_loop_asks_and_at_once_when_told_twice():
    stop.listen(alone=False)
    stop.check_stop()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(stop.StopError, match="stopped by SIGTERM") as raised:
        stop.check_stop()
    assert raised.value.exit_code == 143
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
