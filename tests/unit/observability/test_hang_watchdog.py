"""A run that stands still says where each rank stands and ends; one in which any rank goes on does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.observability.hang_watchdog import RankStatus, clear_rank_files, describe_ranks, read_rank_status, watch_for_hangs

RANK = """
import sys, time
from pathlib import Path
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.rank_log import rank_log

rank, folder, steps = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def notify(line):
    with (folder / "said").open("a") as file:
        file.write(f"rank {rank} says {line}\\n")

def wait_for_another_rank():
    time.sleep(60)

with rank_log(folder, rank, 2) as log, hang_watchdog.watch_for_hangs(folder, rank, 2, 2.0, log, notify):
    while not all((folder / "ranks" / f"rank_0000{one}.json").exists() for one in range(2)):
        time.sleep(0.05)
    for step in range(1, steps + 1):
        hang_watchdog.enter_phase("train", step)
        time.sleep(0.5)
    (folder / f"reached{rank}").touch()
    wait_for_another_rank()
"""


@pytest.fixture
def start(tmp_path):
    """Starts ranks of a world of two; each goes through so many phases of 0.5 s, then waits for long. Ended after the test."""
    ranks: list[subprocess.Popen[bytes]] = []

    def _start(*phases: int) -> list[subprocess.Popen[bytes]]:
        for rank, count in enumerate(phases):
            ranks.append(subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path), str(count)]))
        return ranks

    yield _start
    for process in ranks:
        process.kill()
        process.wait(10)


def hold(process: subprocess.Popen[bytes], reached: Path) -> None:
    deadline = time.monotonic() + 20
    while not reached.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGSTOP)


def test_a_rank_that_is_held_is_named_and_the_others_end(start, tmp_path):
    ranks = start(2, 1)
    hold(ranks[1], tmp_path / "reached1")
    assert ranks[0].wait(20) == 3
    (line,) = (tmp_path / "said").read_text().splitlines()
    assert line.startswith("rank 0 says the run stands still: rank 0: in train of step 2 for "), line
    assert f"; rank 1: in train of step 1, not heard for 2 s (process {ranks[1].pid} on " in line.replace("for 3 s (", "for 2 s ("), line
    assert line.endswith(f"(log.stuck_after); stacks: {tmp_path}/ranks/rank_*.log")
    stacks = (tmp_path / "ranks" / "rank_00000.log").read_text()
    assert "the run stands still; the threads of this rank:" in stacks and "in wait_for_another_rank" in stacks
    assert ranks[1].poll() is None, "srun or torchrun ends it"


def test_the_first_rank_that_still_can_speaks(start, tmp_path):
    ranks = start(1, 1)
    hold(ranks[0], tmp_path / "reached0")
    assert ranks[1].wait(20) == 3
    assert (tmp_path / "said").read_text().startswith("rank 1 says the run stands still: rank 1: in train of step 1 for ")


def test_all_ranks_write_their_stacks_and_one_speaks(start, tmp_path):
    ranks = start(1, 2)
    assert [process.wait(20) for process in ranks] == [3, 3]
    (line,) = (tmp_path / "said").read_text().splitlines()
    assert "rank 0: in train of step 1 for " in line and "; rank 1: in train of step 2 for " in line
    logs = [(tmp_path / "ranks" / f"rank_0000{rank}.log").read_text() for rank in range(2)]
    assert all("in wait_for_another_rank" in log for log in logs)
    clear_rank_files(tmp_path)
    assert sorted(file.name for file in (tmp_path / "ranks").iterdir()) == ["rank_00000.log", "rank_00001.log"]


def test_a_rank_may_wait_long_for_one_that_goes_on(start, tmp_path):
    start(1, 12)
    time.sleep(5)
    assert (tmp_path / "reached0").exists() and not (tmp_path / "said").exists()
    assert read_rank_status(tmp_path / "ranks", 0).seconds > 2


def test_a_limit_of_its_own_does_not_count(tmp_path):
    status = RankStatus(0, "host", 1, "starting the engine", 0, seconds=100.0, limit=90.0, last_seen=50.0)
    assert status.idle_seconds(now=55.0) == 15.0


def test_ranks_that_stand_together_are_told_together():
    statuses = [RankStatus(rank, "host", 100 + rank, "sync" if rank == 3 else "train", 7, 60.0, 0.0, last_seen=1000.0) for rank in range(6)]
    statuses[5] = RankStatus(5, "host", 105, "train", 7, 20.0, 0.0, last_seen=900.0)
    line = describe_ranks(statuses, 1000.0, lambda status, now: now - status.last_seen > 50)
    assert line == (
        "ranks 0-2, 4: in train of step 7 for 60 s; rank 3: in sync of step 7 for 60 s; "
        "rank 5: in train of step 7, not heard for 100 s (process 105 on host: held, or gone)"
    )


def test_nobody_watches_where_it_is_turned_off(tmp_path):
    with watch_for_hangs(tmp_path, 0, 1, 0.0, sys.stderr, print):
        assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_no_stand(tmp_path):
    assert read_rank_status(tmp_path, 0) is None
    (tmp_path / "rank_00000.json").write_text("{")
    assert read_rank_status(tmp_path, 0) is None
