"""What breaks between two nodes (`nodes.py`) of a running job, one row for each fault, and a job that is started again if it has to be."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from support.node_runs import PORT, check_empty, launch, place_engines
from support.nodes import Node
from support.processes import end, until
from support.train_command import finish, latest

LOST_AFTER = 30
"""Seconds of `log.lost_after`."""
MOST_SECONDS = 300
"""Seconds that an end may take on a busy machine."""
HELD = 20
"""Seconds for which the shared folder is held."""


@dataclass(frozen=True)
class Fault:
    """A fault. `line`: pattern of what the end of the run says on some node, or "" if the run goes on. `clean` follows the first end of a
    rank, as srun kills the other ranks then, and `mend` the end of all."""

    strike: Callable[[Sequence[Node]], None]
    line: str = ""
    clean: Callable[[Sequence[Node]], None] = lambda nodes: None
    mend: Callable[[Sequence[Node]], None] = lambda nodes: None


ONE_ENGINE = {"rollout.engines": 1}


class FaultyJob:
    """A job on two nodes with mirrors, with its engine on the second one."""

    def __init__(self, nodes, folder, settings):
        self.nodes, self.folder = nodes, folder
        resumed = {"checkpoint.every": 1, "checkpoint.resume": "auto", "log.lost_after": LOST_AFTER}
        self._settings, self._port = place_engines(nodes) | ONE_ENGINE | resumed | settings, PORT
        self.start()

    def start(self):
        self._port += 1
        self.commands = launch(self.nodes, self.folder, self._settings, self._port)

    def count_rows(self):
        metrics = latest(self.folder) / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.is_file() else 0

    def wait_for_row(self):
        """Return the seconds until the next row. Raise AssertionError if the run ends first."""
        started, before = time.monotonic(), self.count_rows()
        until(lambda: self.count_rows() > before or any(each.ended() for each in self.commands), 900, "a row")
        ended = [each.wait(60) for each in self.commands if each.ended()]
        assert all(each.code == 0 for each in ended), "\n".join(each.err for each in ended)
        return time.monotonic() - started

    def break_down(self, fault):
        """Wait until a fault that has struck has ended the run. Return the seconds until the first rank ended, after everything that is
        promised of such an end, and mend the nodes."""
        started = time.monotonic()
        until(lambda: any(command.ended() for command in self.commands), MOST_SECONDS, "an end")
        seconds = time.monotonic() - started
        fault.clean(self.nodes)
        done = [finish(command, MOST_SECONDS) for command in self.commands]
        assert all(each.code for each in done) and re.search(fault.line, "\n".join(each.err for each in done)), [each.err for each in done]
        until(lambda: not any(node.list_processes() for node in self.nodes), 60, "all processes end")
        fault.mend(self.nodes)
        check_empty(self.nodes)
        return seconds


def _lose(number):
    """Return the fault of a node that ends: its processes are gone, and so is what was in its /tmp."""

    def strike(nodes):
        end(nodes[number].list_processes())
        until(lambda: not nodes[number].list_processes(), 60, "the end of a node")
        nodes[number].run("find", "/tmp", "/dev/shm", "-xdev", "-type", "f", "-delete")

    return Fault(strike, _GONE)


def _stop(number):
    """Return the fault of a rank that is suspended."""

    def strike(nodes):
        words = {process: process.cmdline() for process in nodes[number].list_processes()}
        next(each for each, line in words.items() if line[1:5] == ["-u", "-m", "megatron_rl", "train"]).suspend()

    def kill(nodes):
        end(process for process in nodes[number].list_processes() if process.status() == psutil.STATUS_STOPPED)

    return Fault(strike, _SILENT, clean=kill)


def _terminate(nodes):
    """Signal the launchers as a cluster does that takes the nodes back."""
    for node in nodes:
        for process in node.list_processes():
            if "torch.distributed.run" in process.cmdline():
                process.terminate()


def _kill_engine(nodes):
    end(process for node in nodes for process in node.list_processes() if "rollout_sglang.server" in process.cmdline())


def _for_seconds(seconds, strike, mend):
    def both(nodes):
        strike(nodes)
        time.sleep(seconds)
        mend(nodes)

    return both


def _jump(nodes):
    nodes[0].set_clock(-3600)
    nodes[1].set_clock(3600)


_GONE = "another trainer rank is gone|engine . is lost|the engine"
_SILENT = r"rank [01] \(process \d+ on node[01]\) has been silent for \d+ s \(log.lost_after\): suspended, or cut off"
ENDING = {
    "the first node dies": _lose(0),
    "the second node dies": _lose(1),
    "the cable is out": Fault(lambda nodes: nodes[1].cut(), _SILENT, mend=lambda nodes: nodes[1].cut(down=False)),
    "the first rank is stopped": _stop(0),
    "the second rank is stopped": _stop(1),
    "the job is terminated": Fault(_terminate, "stopped by SIGTERM"),
    "the folder is gone": Fault(lambda nodes: nodes[0].mirror.end(), "not connected", mend=lambda nodes: nodes[0].mirror.restart()),
}
"""Faults that end the run."""
SURVIVED = {
    "the cable is out for 5 s": Fault(_for_seconds(5, lambda nodes: nodes[1].cut(), lambda nodes: nodes[1].cut(down=False))),
    "the clocks jump by an hour": Fault(_jump),
    "/tmp is full": Fault(_for_seconds(5, lambda nodes: nodes[1].fill(), lambda nodes: nodes[1].fill(False))),
    "the folder is held": Fault(_for_seconds(HELD, lambda nodes: nodes[1].mirror.hold(), lambda nodes: nodes[1].mirror.hold(False))),
    "the engine is killed": Fault(_kill_engine),
}
"""Faults that it survives."""
