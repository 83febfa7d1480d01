"""The engine's process before it imports SGLang, and processes on several nodes: they end together, and none is left over."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import alive_after, family, until

from megatron_rl.cli import main as command_line
from megatron_rl.versions import put_programs_on_path
from rollout_sglang import process, server
from rollout_sglang.hooks import registry
from rollout_sglang.platform import stub_modules
from rollout_sglang.process import EngineProcess, EngineProcesses

FOLDER = str(Path(sys.executable).parent)


def test_programs_beside_the_interpreter_are_found_without_activation(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert shutil.which("pytest") is None
    monkeypatch.setattr(command_line, "app", lambda prog_name: None)
    command_line.main()
    assert shutil.which("pytest") == f"{FOLDER}/pytest"
    put_programs_on_path()
    assert os.environ["PATH"] == f"{FOLDER}:/usr/bin:/bin"


def test_an_engine_finds_programs_and_no_megatron_before_it_imports_sglang(monkeypatch):
    """An engine started by another node's launcher does not have this environment."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "umask", lambda _: 0)
    steps = []
    monkeypatch.setattr(stub_modules, "block_megatron", lambda: steps.append("blocked"))
    monkeypatch.setattr(registry, "verify", lambda: sys.exit(os.environ["PATH"]))
    with pytest.raises(SystemExit, match=f"^{FOLDER}:"):
        server.main(["--parent", "0"])
    assert steps == ["blocked"]


def test_a_blocked_megatron_is_a_missing_one(tmp_path):
    """This also holds in a child that multiprocessing spawns, which imports the main module under another name."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise FileNotFoundError('libtransformer_engine.so')")
    script = "import runpy; runpy.run_module('rollout_sglang.server', run_name='__mp_main__')\ntry:\n import megatron.core\n"
    script += "except ModuleNotFoundError as error:\n print(error.name)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("megatron"), done.stderr


SERVER = """
import os, sys, time
print("node", sys.argv[3], flush=True)
while not os.path.exists(sys.argv[4]):
    time.sleep(0.02)
sys.exit(5)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start an engine whose nodes print their numbers and wait for a file. Return the engine and the files."""
    (tmp_path / "stand_in_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engines = []

    def start(nodes: int) -> tuple[EngineProcesses, list[Path]]:
        ends = [tmp_path / f"end{node}" for node in range(nodes)]
        logs = [tmp_path / f"node{node}.log" for node in range(nodes)]
        processes = [EngineProcess([str(node), str(ends[node])], {}, logs[node], "stand_in_server") for node in range(nodes)]
        engines.append(EngineProcesses(processes))
        until(lambda: all("node" in log.read_text() for log in logs), 60, "every node")
        return engines[-1], ends

    yield start
    for engine in engines:
        engine.kill()


def test_an_engine_ends_with_the_first_of_its_nodes(start):
    engine, ends = start(3)
    assert not engine.has_ended() and not engine.wait_for_end(0.01) and engine.log.name == "node0.log"
    ends[1].touch()
    assert engine.wait_for_end(60)
    engine.kill()
    assert engine.describe_end() == "exit code 5 on node 1", "the others were ended with it"
    assert engine.log.name == "node1.log" and engine.log_tail() == "node 1"


def test_the_end_of_the_only_node_needs_no_number_and_memory_is_that_of_all(start):
    engine, ends = start(1)
    two, _ = start(2)
    assert two.get_memory_mb() > 1.5 * engine.get_memory_mb() > 0
    ends[0].touch()
    assert engine.wait_for_end(60) and engine.describe_end() == "exit code 5"
    two.stop()
    assert len(two.pids) == 2 and not any(map(family, two.pids))


LINGERING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "10000"], start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
print("node", sys.argv[3], flush=True)
time.sleep(10000)
"""


@pytest.mark.timeout(100)
def test_a_server_that_lingers_without_its_children_is_not_waited_for(start, tmp_path, monkeypatch):
    """SGLang's server lingers for 5 s and never checks how the schedulers ended."""
    (tmp_path / "stand_in_server.py").write_text(LINGERING)
    engine, _ = start(1)
    server, child = family(engine.pids[0])
    monkeypatch.setattr(process, "_GRACE_SECONDS", 10000.0)
    engine.stop()
    assert alive_after([server, child], 10) == []
