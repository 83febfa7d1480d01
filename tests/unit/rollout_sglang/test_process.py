"""Processes of an engine on several nodes: the engine ends with the first that ends, and no process is left over."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import alive_after, family, until

from rollout_sglang import process
from rollout_sglang.process import EngineProcess, EngineProcesses

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
