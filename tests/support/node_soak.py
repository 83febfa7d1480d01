"""A run over two nodes under random faults: `PYTHONPATH=.:tests:tools python -m support.node_soak --minutes 30 --seed 0 --folder DIR`.

Prints each fault with the seconds to the next recorded step, and what the processes of each node hold a few steps after each start and
before the next fault: memory, threads, open files, and sockets. Afterward, `tools/soak.py` checks that every problem was trained on once,
in order, and that every sync was proved. The exit code is 1 if anything is violated.
"""

import argparse
import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from soak import find_faults

from support.node_faults import ENDING, SURVIVED, FaultyJob
from support.nodes import Cluster
from support.train_command import latest

SETTLED = 3  # steps after a start at which memory counts as settled


def measure(node):
    """Return the MB of unshared memory, threads, open files, and sockets of all processes of a node."""
    total = dict.fromkeys(("MB", "threads", "files", "sockets"), 0)
    for process in node.list_processes():
        with suppress(psutil.Error):
            total["MB"] += process.memory_full_info().uss >> 20
            total["threads"] += process.num_threads()
        for file in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):  # it was just closed
                total["sockets"] += os.readlink(file).startswith("socket:")
                total["files"] += 1
    return total


def soak(nodes, folder, seconds, seed):
    generator, deadline, growth = random.Random(seed), time.monotonic() + seconds, []
    job, every = FaultyJob(nodes, folder, {"train.steps": 100_000, "data.eval_every": 1000}), ENDING | SURVIVED
    del every["the clocks jump by an hour"]  # the seconds of a fault are those of the rows
    while True:
        for _ in range(SETTLED):
            job.wait_for_row()
        before, row = [measure(node) for node in nodes], job.count_rows()
        for _ in range(generator.randrange(10, 40)):
            if time.monotonic() < deadline:
                job.wait_for_row()
        growth.append({"steps": job.count_rows() - row, "before": before, "after": [measure(node) for node in nodes]})
        print(json.dumps(growth[-1]), flush=True)
        name = "the job is terminated" if (is_last := time.monotonic() >= deadline) else generator.choice(list(every))
        time.sleep(generator.uniform(0, 3))  # so that it strikes in any phase
        every[name].strike(nodes)
        if name in ENDING:
            print(f"step {job.count_rows() - 1}: {name}, ended after {job.break_down(ENDING[name]):.0f} s", flush=True)
            if is_last:
                return
            job.start()
        print(f"step {job.count_rows() - 1}: {name}, next step recorded after {job.wait_for_row():.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True)
    with Cluster(2, folder, mirrored=True) as nodes:
        soak(nodes, folder / "run", 60 * options.minutes, options.seed)
    faults = find_faults(latest(folder / "run"))
    print("wrong:", *faults[:20], sep="\n  ") if faults else print("every problem was trained on once, in order; no mismatch")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
