"""SIGTERM or SIGUSR1 ends a run of one process at once; of several ranks each notes it and all stop where the loop asks."""

import signal

import pytest

from megatron_rl.errors import RunError
from megatron_rl.observability import signals


@pytest.fixture(autouse=True)
def own_handler():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    signals.install_signal_handlers(alone=False)  # forgets the signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_of_one_process_unwinds_at_once_and_ranks_stop_where_the_loop_asks(number):
    signals.install_signal_handlers(alone=True)
    with pytest.raises(SystemExit) as unwound:
        signal.raise_signal(number)
    assert unwound.value.code == 143
    signals.install_signal_handlers(alone=False)
    signals.check_stop()
    signal.raise_signal(number)
    with pytest.raises(signals.StopError, match=f"stopped by {number.name}") as raised:
        signals.check_stop()
    assert raised.value.exit_code == 143
    with pytest.raises(SystemExit):  # a second signal ends a rank at once
        signal.raise_signal(number)


def test_what_breaks_after_the_signal_is_the_stop():
    signals.install_signal_handlers(alone=False)
    broken = RunError("the engine is gone")
    assert signals.prefer_stop_error(broken) is broken
    signal.raise_signal(signal.SIGTERM)
    assert str(signals.prefer_stop_error(broken)) == "stopped by SIGTERM"
