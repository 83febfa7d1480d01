"""Commands whose console goes away: a closed pipe, a terminal that hangs up, a full disk."""

import json
import os
import pty
import subprocess
import sys

import pytest
from support.processes import ROOT, one_thread_environment

from megatron_rl.observability.run_folder import read_run

LOGS = """
import sys
from pathlib import Path
from megatron_rl.observability.signals import install_signal_handlers
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.streams import keep_streams
install_signal_handlers()
keep_streams()
log = RunLog.create(Path(sys.argv[1]), {"train": {"steps": 3}}, {})
sys.stdin.readline()
for step in (1, 2, 3):
    log.set_phase("train")
    log.write_step({"step": step, "time/step": 1.0})
    print("a library prints", step)
    print("a library warns", step, file=sys.stderr, flush=True)
log.write_event("the last line")
log.finish("finished")
print("more")
"""


def start(folder, out, err, environment=None):
    words = [sys.executable, "-c", LOGS, str(folder)]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=ROOT, env={**one_thread_environment(), **(environment or {})}
    )


def check(process, folder, losses):
    assert process.wait(120) == 0
    log = (folder / "latest" / "run.log").read_text()
    assert [log.count(part) for part in ("step 1/3", "step 2/3", "step 3/3", "the last line", "run finished")] == [1] * 5, log
    assert [line.partition("  ")[2] for line in log.splitlines() if "cannot be written" in line] == losses
    assert read_run(folder / "latest")["status"] == "finished"


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_pipe_whose_reader_ends_is_noted_once_in_run_log(tmp_path, environment):
    process = start(tmp_path, subprocess.PIPE, subprocess.PIPE, environment)
    process.stdout.readline()
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.flush()
    errors = process.stderr.read().decode()
    line = "standard output cannot be written (Broken pipe); the run goes on, and run.log has every line"
    check(process, tmp_path, [line])
    assert errors.splitlines() == [f"a library warns {step}" for step in (1, 2, 3)]


def test_a_terminal_that_hangs_up_ends_nothing(tmp_path):
    ours, theirs = pty.openpty()
    process = start(tmp_path, theirs, theirs, {"TERM": "xterm"})
    os.close(theirs)
    assert os.read(ours, 1)
    os.close(ours)
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.wait(120)
    log = (tmp_path / "latest" / "run.log").read_text()
    assert "standard output cannot be written (Input/output error)" in log
    assert process.returncode == 0 and "run finished" in log


def test_a_full_disk_under_the_console_loses_lines_of_the_console_only(tmp_path):
    with open("/dev/full", "wb") as full:
        process = start(tmp_path, full, subprocess.DEVNULL)
        process.stdin.write(b"\n")
        process.stdin.flush()
        check(
            process, tmp_path, ["standard output cannot be written (No space left on device); the run goes on, and run.log has every line"]
        )


def test_a_pipe_that_another_program_made_non_blocking_gets_every_byte(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = "from megatron_rl.observability.streams import keep_streams; keep_streams(); print('x' * 1_000_000)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"x" * 1_000_000 + b"\n"
    assert process.wait(60) == 0, process.stderr.read()


def test_no_file_takes_the_place_of_a_closed_stream():
    code = (
        "import json, sys; from megatron_rl.observability.streams import keep_streams\nkeep_streams()\nprint('dropped')\n"
        "json.dump(open(__import__('os').devnull).fileno(), open(sys.argv[1], 'w'))"
    )
    reader, writer = os.pipe()
    with open(reader) as file:
        words = ["sh", "-c", f'exec "$0" -c "$1" /dev/fd/{writer} <&- >&- 2>&-', sys.executable, code]
        assert subprocess.run(words, pass_fds=[writer], cwd=ROOT, check=False).returncode == 0
        os.close(writer)
        assert json.load(file) > 2


@pytest.mark.parametrize("words", [("--help",), ("doctor",), ("report", "nothing"), ("plan", "nothing.toml"), ("train", "nothing.toml")])
def test_a_command_whose_reader_is_gone_has_its_usual_exit_code_and_no_traceback(words):
    def run(**streams):
        return subprocess.run([sys.executable, "-m", "megatron_rl", *words], cwd=ROOT, env=one_thread_environment(), check=False, **streams)

    usual = run(capture_output=True)
    reader, writer = os.pipe()
    os.close(reader)
    piped = run(stdout=writer, stderr=subprocess.PIPE)
    assert (piped.returncode, piped.stderr) == (usual.returncode, usual.stderr)
    assert run(stdout=writer, stderr=writer).returncode == usual.returncode
    os.close(writer)


def test_a_character_that_the_console_has_not_ends_nothing():
    code = r"from megatron_rl.observability.streams import keep_streams; keep_streams(); print('\xe9 \udcff')"
    environment = one_thread_environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert done.stdout == rb"\xe9 \udcff" + b"\n"
