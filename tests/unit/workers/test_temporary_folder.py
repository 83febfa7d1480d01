"""Temporary files of a process and of what is forked from it go with the last of them, however they end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ROOT, until

from megatron_rl.errors import UserError
from megatron_rl.workers import temporary_folder
from megatron_rl.workers.temporary_folder import use_private_temporary_folder

PROCESS = """
import os, sys, tempfile, time
from megatron_rl.workers import temporary_folder
from megatron_rl.workers.temporary_folder import use_private_temporary_folder
use_private_temporary_folder()
if not (child := os.fork()):
    time.sleep(1000)
(open(tempfile.mkstemp()[1], "w")).close()
print(os.environ["TMPDIR"], child, flush=True)
time.sleep(1000)
"""


def test_a_folder_is_removed_when_the_last_process_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", PROCESS], env=environment, stdout=subprocess.PIPE, text=True)
    name, child = process.stdout.readline().split()
    folder = Path(name)
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir())
    process.kill()
    process.wait()
    assert folder.exists(), "a forked process still runs"
    os.kill(int(child), signal.SIGKILL)
    until(lambda: not folder.exists(), 60, "the folder is removed")


def test_a_path_too_long_for_sockets_is_refused(tmp_path, monkeypatch):
    (folder := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(temporary_folder, "_open_ends", [])
    with pytest.raises(UserError, match="TMPDIR = .*must have at most 81 bytes"):
        use_private_temporary_folder()
    assert not list(folder.iterdir())
