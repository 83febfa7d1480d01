"""A session of tests leaves nothing in the system's temporary folder, whatever its processes leave in their own."""

import os
import subprocess
import sys

from support.processes import ROOT

INNER = """
import subprocess, sys, tempfile

def test_leave_files(tmp_path):
    code = "import tempfile; print(tempfile.mkdtemp())"
    made = [tempfile.mkdtemp(), subprocess.check_output([sys.executable, "-c", code], text=True), str(tmp_path)]
    assert all(path.startswith({folder!r}) for path in made)
    assert len(made[0]) < len({folder!r}) + 30, "the path of a Unix socket has at most 107 bytes"
"""


def test_a_session_removes_what_its_processes_leave_behind(tmp_path):
    system, inner = tmp_path / "system", tmp_path / "test_inner.py"
    system.mkdir()
    inner.write_text(INNER.format(folder=str(system)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "xdist", "-n", "1", inner]
    environment = {**os.environ, "TMPDIR": str(system), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert list(system.iterdir()) == []
