"""Real runs that lose their console or get a signal: where they stop, what they save, and how they end."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest
from support import train_command
from support.processes import ROOT, alive_after, end, family, one_thread_environment, until
from support.train_command import LONG, TINY, TORCHRUN, latest, make_model, read_json, read_rows

from megatron_rl.observability.hang_watchdog import read_rank_status

pytestmark = pytest.mark.timeout(6000)
CODES = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGHUP: 129}
LARGER = {  # phases long enough for a signal to hit them
    "train.steps": 500,
    "rollout.prompts_per_step": 16,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 32,
    "rollout.max_running_requests": 64,
    "rollout.max_total_tokens": 8192,
    "data.eval_size": 32,
    "data.eval_every": 1,
}
PROXIES = {
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "all_proxy": "socks5://127.0.0.1:9",
    "no_proxy": "10.0.0.0/8",
}


def wait_for_phase(ended, folder, phase, step=2):
    """Wait until rank 0 is in a phase of a step, or a later one."""

    def is_there():
        status = read_rank_status(latest(folder) / "ranks", 0)
        return ended() or (status is not None and status.phase == phase and status.step >= step)

    until(is_there, LONG, phase)
    assert not ended(), (folder / "stderr").read_text()


def check_stop(folder, name, saved=True):
    """Check that a run was stopped by a signal after the newest complete policy version was saved."""
    run = latest(folder)
    record = read_json(run / "run.json")
    assert (record["status"], record["reason"]) == ("broken", f"stopped by {name}"), (run / "run.log").read_text()
    rows, checkpoints = read_rows(run), sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    if saved:
        last = int(checkpoints[-1].removeprefix("step_"))
        state = read_json(run / "checkpoints" / checkpoints[-1] / "state.json")
        assert last - (state["unrecorded"] is not None) == rows[-1]["step"], "no version is lost"
    else:
        assert not checkpoints and "no last checkpoint" not in (run / "run.log").read_text()


@contextlib.contextmanager
def on_a_terminal(folder, changes, **variables):
    """Start `train` on a terminal of its own, behind proxies that lead nowhere. Yield the process and the descriptor of the terminal."""
    words = make_model(folder, {**TINY, "model.path": folder / "model", "log.dir": folder / "runs", **changes})
    ours, theirs = pty.openpty()

    def lead_session():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "megatron_rl", "train", *map(str, words)]
    environment = {**one_thread_environment(), **PROXIES, "TERM": "xterm", **variables}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=(folder / "stderr").open("wb"), preexec_fn=lead_session
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield process, ours
    finally:
        end(family(process.pid))
        process.wait(60)


def read_all(terminal):
    """Return what a terminal shows until its program closes it or nothing is left."""
    text = b""
    with contextlib.suppress(OSError):  # also nothing to read at the moment
        while part := os.read(terminal, 1 << 16):
            text += part
    return text.decode(errors="replace")


@pytest.mark.long
def test_a_terminal_that_closes_behind_dead_proxies_stops_the_run_after_the_policy_version(tmp_path):
    with on_a_terminal(tmp_path, LARGER) as (process, terminal):
        shown = []

        def read_and_see_the_end():  # a terminal that nobody reads would hold the run
            shown.append(read_all(terminal))
            return process.poll() is not None

        wait_for_phase(read_and_see_the_end, tmp_path, "train")
        assert "step 1/500" in "".join(shown)
        processes = family(process.pid)
        os.close(terminal)
        assert process.wait(LONG) == CODES[signal.SIGHUP]
        assert alive_after(processes, 60) == []
    check_stop(tmp_path, "SIGHUP")
    log = (latest(tmp_path) / "run.log").read_text()
    assert log.count("standard output cannot be written (Input/output error)") == 1, log
    assert (tmp_path / "stderr").read_text().splitlines()[-1] == "megatron-rl: stopped by SIGHUP"


@pytest.mark.long
def test_a_run_of_nohup_whose_reader_ends_runs_to_its_end(tmp_path):
    words = make_model(tmp_path, {**TINY, "model.path": tmp_path / "model", "log.dir": tmp_path / "runs"})
    command = ["nohup", sys.executable, "-m", "megatron_rl", "train", *map(str, words)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=one_thread_environment(), **streams) as process:
        for _ in range(2):
            process.stdout.readline()
        process.stdout.close()
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(LONG) == 0
    run = latest(tmp_path)
    log = (run / "run.log").read_text()
    assert read_json(run / "run.json")["status"] == "finished" and len(read_rows(run)) == 3
    assert [log.count(part) for part in ("step 0/2", "step 1/2", "step 2/2", "run finished", "(Broken pipe)")] == [1] * 5, log


PLACES = [
    ("starting the engines", 0, signal.SIGTERM),
    ("generate", 2, signal.SIGTERM),
    ("logprobs", 2, signal.SIGHUP),
    ("train", 2, signal.SIGTERM),
    ("train", 2, signal.SIGUSR1),
    ("sync", 2, signal.SIGTERM),
    ("eval", 2, signal.SIGUSR1),
    ("checkpoint", 2, signal.SIGTERM),
]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one process", "two ranks"])
@pytest.mark.parametrize(("phase", "step", "number"), PLACES)
def test_a_signal_anywhere_saves_the_newest_complete_version(phase, step, number, launcher, tmp_path):
    changes = {**LARGER, "checkpoint.every": 1 if phase == "checkpoint" else 0}
    if launcher:
        changes |= {"train.layout.tp": 2}
        number = signal.SIGTERM  # torchrun passes on no SIGUSR1, and the kernel a terminal's SIGHUP to all
    with train_command.train(tmp_path, changes, launcher=launcher) as command:
        wait_for_phase(command.ended, tmp_path, phase, step)
        processes = family(command.pid)
        start = time.monotonic()
        os.kill(command.pid, number)
        done = command.wait(LONG)
        assert time.monotonic() - start < 300
        assert alive_after(processes, 60) == []
    assert done.code == (1 if launcher else CODES[number]), done.err  # torchrun's own exit code
    assert f"stopped by {number.name}" in done.err and (launcher or "Traceback" not in done.err), done.err
    check_stop(tmp_path, number.name, saved=step > 0)


@pytest.mark.long
def test_a_second_signal_ends_the_optimizer_steps_at_once(tmp_path):
    with train_command.train(tmp_path, {**LARGER, "rollout.prompts_per_step": 128, "data.eval_every": 100}) as command:
        wait_for_phase(command.ended, tmp_path, "train", 1)
        os.kill(command.pid, signal.SIGTERM)
        time.sleep(0.8)
        os.kill(command.pid, signal.SIGTERM)
        done = command.wait(LONG)
    assert done.code == CODES[signal.SIGTERM] and done.err.splitlines()[-1] == "megatron-rl: stopped by SIGTERM"
    check_stop(tmp_path, "SIGTERM", saved=False)
    assert len(read_rows(latest(tmp_path))) == 1
