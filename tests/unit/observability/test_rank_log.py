"""A rank's log, and the signals that end a run."""

import logging
import os
import signal
import warnings

import pytest

from megatron_rl.errors import RunError
from megatron_rl.observability import signals
from megatron_rl.observability.rank_log import rank_log


def text(folder) -> str:
    return (folder / "ranks" / "rank_00003.log").read_text()


def test_warnings_of_all_kinds_are_in_it_and_nothing_less(tmp_path, monkeypatch, capsys):
    before = list(logging.getLogger().handlers)
    with rank_log(tmp_path, 3, 8):
        logging.getLogger("a.library").warning("careful: %d", 5)
        logging.getLogger("a.library").info("chatter")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        assert "WARNING a.library: careful: 5" in text(tmp_path), "it is on the disk at once"
    logging.getLogger("a.library").warning("after the run")
    first, *rest = text(tmp_path).splitlines()
    assert f" rank 3 of 8: process {os.getpid()} on " in first
    assert any("WARNING py.warnings: " in line and "DeprecationWarning: old" in line for line in rest)
    assert "chatter" not in text(tmp_path) and "after" not in text(tmp_path)
    assert logging.getLogger().handlers == before
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without handlers they still go to the console
    with rank_log(tmp_path, 3, 8):
        logging.getLogger("a.library").warning("unhandled")
    assert "unhandled" in capsys.readouterr().err and "unhandled" in text(tmp_path)


def test_how_a_rank_ended(tmp_path):
    for error in (RunError("the engine is gone"), ZeroDivisionError("a bug")):
        with pytest.raises(type(error)), rank_log(tmp_path, 3, 8):
            raise error
    assert "ended: RunError: the engine is gone\n" in text(tmp_path)
    assert "Traceback" in text(tmp_path) and "ZeroDivisionError: a bug\n" in text(tmp_path)
    assert text(tmp_path).count("rank 3 of 8") == 2, "a run that goes on writes on"


@pytest.fixture(autouse=True)
def own_handler():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    signals.install_signal_handlers(alone=False)  # forgets the signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_of_one_process_unwinds_at_once_and_ranks_stop_when_the_loop_checks(number):
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


def test_errors_after_the_signal_are_reported_as_the_stop():
    signals.install_signal_handlers(alone=False)
    broken = RunError("the engine is gone")
    assert signals.prefer_stop_error(broken) is broken
    signal.raise_signal(signal.SIGTERM)
    assert str(signals.prefer_stop_error(broken)) == "stopped by SIGTERM"
