"""A run without progress reports where each rank is and ends. A run in which any rank makes progress does not."""

import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from support.processes import until

from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.hang_watchdog import RankStatus, enter_phase, read_rank_status, watch_for_hangs
from megatron_rl.observability.rank_log import rank_log

STUCK_AFTER = 4.0  # seconds
SCENARIOS = {"held": (2, 1), "speaker held": (1, 1), "all wait": (1, 2), "one goes on": (1, 600)}  # phases of 0.5 s of ranks 0 and 1


def live(folder: Path, rank: int, phases: int, started: Barrier) -> None:
    """Run one of two ranks: pass through its phases, then wait for a long time."""

    def write_line(line: str) -> None:
        with (folder / "lines").open("a") as file:
            file.write(f"rank {rank} says {line}\n")

    def wait_for_another_rank() -> None:
        time.sleep(600)

    started.wait(60)  # a rank alone would count as a run that stands still
    with rank_log(folder, rank, 2) as log, watch_for_hangs(folder, rank, 2, STUCK_AFTER, log, write_line):
        while not all((folder / "ranks" / f"rank_0000{other}.json").exists() for other in range(2)):
            time.sleep(0.05)
        for step in range(1, phases + 1):
            enter_phase("train", step)
            time.sleep(0.5)
        (folder / f"reached{rank}").touch()
        wait_for_another_rank()


@dataclass
class World:
    folder: Path
    ranks: list[BaseProcess]
    started: Barrier
    held: BaseProcess | None = None

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each rank, or None if the rank is suspended."""
        for process in self.ranks:
            process.join(0 if process is self.held else 60)
        return [process.exitcode for process in self.ranks]

    def hold(self, rank: int) -> None:
        until(lambda: (self.folder / f"reached{rank}").exists(), 60, f"rank {rank} waits")
        self.held = self.ranks[rank]
        os.kill(self.held.pid, signal.SIGSTOP)

    def lines(self) -> list[str]:
        file = self.folder / "lines"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Run all scenarios at once, since they mostly wait. Two of them have a rank that is suspended in its last phase."""
    spawn, worlds = multiprocessing.get_context("spawn"), {}
    for name, phases in SCENARIOS.items():
        folder = tmp_path_factory.mktemp("world")
        started = spawn.Barrier(2)  # kept by its world: it ends with its last reference here
        ranks = [spawn.Process(target=live, args=(folder, rank, count, started)) for rank, count in enumerate(phases)]
        worlds[name] = World(folder, ranks, started)
        for process in worlds[name].ranks:
            process.start()
    worlds["speaker held"].hold(0)
    worlds["held"].hold(1)
    yield worlds
    for process in [process for world in worlds.values() for process in world.ranks]:
        process.kill()
        process.join(10)


def test_a_held_rank_is_named_one_rank_speaks_and_all_write_their_stacks(worlds):
    world = worlds["held"]
    assert world.exit_codes() == [3, None], "srun or torchrun ends the rank that is held"
    (line,) = world.lines()
    assert line.startswith("rank 0 says the run hangs: rank 0: in train of step 2 for "), line
    assert re.search(rf"; rank 1: in train of step 1, not heard for \d+ s \(process {world.held.pid} on ", line), line
    assert line.endswith(f"(log.stuck_after); stacks: {world.folder}/ranks/rank_*.log")
    stacks = (world.folder / "ranks" / "rank_00000.log").read_text()
    assert "the run hangs; the threads of this rank:" in stacks and "in wait_for_another_rank" in stacks
    assert worlds["speaker held"].exit_codes() == [None, 3]
    (line,) = worlds["speaker held"].lines()
    assert line.startswith("rank 1 says the run hangs: rank 1: in train of step 1 for ")
    world = worlds["all wait"]
    assert world.exit_codes() == [3, 3]
    (line,) = world.lines()
    assert "rank 0: in train of step 1 for " in line and "; rank 1: in train of step 2 for " in line
    logs = [(world.folder / "ranks" / f"rank_0000{rank}.log").read_text() for rank in range(2)]
    assert all("in wait_for_another_rank" in log for log in logs)
    hang_watchdog.clear_rank_files(world.folder)
    assert sorted(file.name for file in (world.folder / "ranks").iterdir()) == ["rank_00000.log", "rank_00001.log"]


def test_a_rank_may_wait_long_for_one_that_goes_on(worlds):
    world = worlds["one goes on"]
    until(lambda: read_rank_status(world.folder / "ranks", 0).seconds > STUCK_AFTER + 1, 60, "rank 0 waits for long")
    assert (world.folder / "reached0").exists() and not (world.folder / "reached1").exists() and not world.lines()


def test_ranks_in_the_same_phase_are_named_together_and_unreadable_files_have_no_status(tmp_path):
    limited = RankStatus(0, "host", 1, "starting the engine", 0, seconds=100.0, limit=90.0, last_seen=50.0)
    assert limited.idle_seconds(now=55.0) == 15.0, "a limit of its own does not count"
    statuses = [RankStatus(rank, "host", 100 + rank, "sync" if rank == 3 else "train", 7, 60.0, 0.0, last_seen=1000.0) for rank in range(6)]
    statuses[5] = RankStatus(5, "host", 105, "train", 7, 20.0, 0.0, last_seen=900.0)
    line = hang_watchdog.describe_ranks(statuses, 1000.0, lambda status, now: now - status.last_seen > 50)
    assert line == (
        "ranks 0-2, 4: in train of step 7 for 60 s; rank 3: in sync of step 7 for 60 s; "
        "rank 5: in train of step 7, not heard for 100 s (process 105 on host: suspended or dead)"
    )
    with watch_for_hangs(tmp_path, 0, 1, 0.0, sys.stderr, print):
        assert not list(tmp_path.iterdir())
    assert read_rank_status(tmp_path, 0) is None
    (tmp_path / "rank_00000.json").write_text("{")
    assert read_rank_status(tmp_path, 0) is None
