"""If a rank hangs in a collective, the other ranks report where all ranks are, and end. A signal to one rank stops all."""

import linecache
import os
import re
import signal
import time

import psutil
import torch.distributed as dist
from support.models import FP8
from support.processes import World, alive_after, until
from support.trainer import start
from support.training_runs import train_to

from megatron_rl.distributed.heartbeats import watch_for_lost_ranks
from megatron_rl.errors import RunError
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.hang_watchdog import read_rank_status
from megatron_rl.observability.rank_log import rank_log
from megatron_rl.observability.signals import install_signal_handlers, prefer_stop_error, stopping
from parallel.layout import Layout


def train_with_watchdog(folder, run, precision, stuck_after):
    """Train forever. The watchdog's message is written to `run`/message."""
    start(layout := Layout(tp=2))
    run.mkdir(exist_ok=True)
    rank = dist.get_rank()
    with (
        rank_log(run, rank, 2) as log,
        hang_watchdog.watch_for_hangs(run, rank, 2, stuck_after, log, lambda line: (run / "message").write_text(f"rank {rank}: {line}")),
    ):
        train_to(folder, run, 1_000_000, precision, layout=layout)


def break_after_a_signal(rank):
    """Return the error that ends a run that breaks on all ranks after `rank` got SIGUSR1."""
    start(Layout(tp=2))
    install_signal_handlers()
    with stopping(at_once=False):
        if dist.get_rank() == rank:
            signal.raise_signal(signal.SIGUSR1)
    return prefer_stop_error(RunError("the engine is gone"), alone=False)


def test_a_held_rank_ends_the_run_that_says_where_each_rank_stands(checkpoint, tmp_path):
    run = tmp_path / "run"
    with World(2, tmp_path / "world") as world:
        world.send(train_with_watchdog, checkpoint, run, FP8, 8.0)
        until(lambda: (stand := read_rank_status(run / "ranks", 1)) is not None and stand.step >= 2, 900, "rank 1 trains")
        os.kill(world.pid(1), signal.SIGSTOP)
        assert alive_after([psutil.Process(world.pid(0))], 600) == []
    message = (run / "message").read_text()
    place = r"in (generate|share|logprobs|attribute|train|checkpoint|sync|eval|the start) of step \d+"
    line = rf"rank 0: the run hangs: rank 0: {place} for \d+ s; rank 1: {place}, not heard for \d+ s \(process "
    assert re.match(line, message), message
    stacks = (run / "ranks" / "rank_00000.log").read_text()
    loop = stacks[: stacks.index("training/loop.py")].rpartition("hread 0x")[2]  # the stack of the thread that trains, innermost first
    file, line = re.search(r'File "(.+)", line (\d+)', loop).groups()
    is_collective = file.endswith("distributed_c10d.py") or ".wait()" in linecache.getline(file, int(line))  # or one that was begun before
    assert is_collective, f"rank 0 waits in {file}:{line}"


def test_a_signal_to_one_rank_is_the_stop_of_all(worlds):
    errors = worlds(2).call(break_after_a_signal, 1)
    assert [(str(error), error.exit_code) for error in errors] == [("stopped by SIGUSR1", 143)] * 2


def beat(run, lost_after, leaving):
    """Exchange heartbeats until a rank is lost. The rank `leaving` leaves at once."""
    start(Layout(dp=3))
    rank = dist.get_rank()
    with watch_for_lost_ranks(lost_after, lambda line: (run / f"{rank}").write_text(line)):
        (run / f"{rank}.started").touch()
        while rank != leaving:
            time.sleep(1)


def test_a_suspended_rank_is_named_to_all_and_one_that_has_left_is_not_missed(tmp_path):
    with World(3, tmp_path / "world") as world:
        world.send(beat, tmp_path, 3.0, 1)
        until(lambda: all((tmp_path / f"{rank}.started").exists() for rank in range(3)), 300, "all ranks beat")
        time.sleep(5)  # rank 1 has left for longer than `lost_after`
        assert not (tmp_path / "0").exists()
        os.kill(world.pid(2), signal.SIGSTOP)
        assert alive_after([psutil.Process(world.pid(0))], 60) == []
        line = (tmp_path / "0").read_text()
        os.kill(world.pid(2), signal.SIGCONT)
        assert alive_after([psutil.Process(world.pid(2))], 60) == []
    assert re.match(rf"rank 2 \(process {world.pid(2)} on .+\) has been silent for \d+ s \(log.lost_after\): suspended, or cut off", line)
