"""The signals that end a run, and what they wait for."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl.distributed import _ErrorRecord
from megatron_rl.errors import RunError
from megatron_rl.observability import signals

CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def own_handlers(monkeypatch):
    before = {number: signal.getsignal(number) for number in CODES}
    monkeypatch.setattr(signals, "_ONE_SIGNAL_SECONDS", 0.0)
    signals.install_signal_handlers()
    yield
    signals.install_signal_handlers()  # forgets the signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", CODES)
def test_a_first_signal_ends_a_command_at_once_or_at_the_next_check_and_a_second_at_once(number):
    with pytest.raises(SystemExit) as unwound:
        signal.raise_signal(number)
    assert unwound.value.code == CODES[number]
    signals.install_signal_handlers()
    with signals.stopping(at_once=False):
        signals.check_stop()
        signal.raise_signal(number)
        with pytest.raises(signals.StopError, match=f"stopped by {number.name}") as raised:
            signals.check_stop()
        assert raised.value.exit_code == CODES[number] and not signals.is_second()
        assert _ErrorRecord.of(raised.value).restore().exit_code == CODES[number], "on all ranks"
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    assert signals.is_second()


def test_what_a_launcher_passes_on_a_moment_later_is_the_same_signal(monkeypatch):
    monkeypatch.setattr(signals, "_ONE_SIGNAL_SECONDS", 60.0)
    with signals.stopping(at_once=False):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
    assert not signals.is_second()


def raise_twice():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)


def test_rank_0_leaves_work_for_which_all_wait_by_an_error_that_reaches_them():
    with signals.stopping(at_once=False):
        with pytest.raises(signals.StopError, match="stopped by SIGUSR1"), signals.stoppable():
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(signals.StopError), signals.stoppable():
            pytest.fail("it begins nothing new")
        signals.install_signal_handlers()
        with pytest.raises(SystemExit), signals.stoppable():
            raise_twice()


def test_errors_after_the_signal_are_reported_as_the_stop():
    broken = RunError("the engine is gone")
    with signals.stopping(at_once=False):
        for alone in (True, False):
            assert signals.prefer_stop_error(broken, alone) is broken
        signal.raise_signal(signal.SIGTERM)
        for alone in (True, False):
            assert str(signals.prefer_stop_error(broken, alone)) == "stopped by SIGTERM"


@pytest.mark.parametrize("number", CODES)
def test_a_command_that_starts_ends_with_the_documented_code_and_nohup_keeps_it(number):
    code = (
        "import time\nfrom megatron_rl.cli import main\nmain.install_signal_handlers()\n"
        "with main.expected_errors(), main.no_other_exit():\n print('up', flush=True); time.sleep({})"
    )

    def end(seconds, *prefix):
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code.format(seconds)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout.readline() == b"up\n"
        os.kill(process.pid, number)
        return process.wait(120), process.stderr.read()

    start = time.monotonic()
    assert end(600) == (CODES[number], b"") and time.monotonic() - start < 120
    if number == signal.SIGHUP:
        assert end(1, "nohup")[0] == 0
