"""What grows with the number of nodes: `PYTHONPATH=.:tests python -m support.node_scaling 2 4 8 16`.

Each node is a namespace (`nodes.py`) with one trainer rank. A row has the seconds of the slowest rank, and the bytes that rank 0's node and
the busiest node have sent: for the start (process groups of Megatron), a barrier (`run_on_rank0`), a number of each rank on every rank
(`gather_from_ranks`), a sum of 4 MB, and a minute of heartbeats. The plan is that of a rank's own part of a sync of Qwen3-8B with an engine
on each node, in processor seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from support.nodes import Cluster
from support.train_command import LONG, finish

REPEATS = 20
PORT = 29500


def count_sent():
    """Return the bytes that this node has sent over its cable."""
    return next(int(line.split()[9]) for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line)


def measure_rank(size):
    """Return the seconds and bytes of each part on this rank."""
    import torch
    import torch.distributed as dist

    from megatron_rl.config import PrecisionConfig
    from megatron_rl.distributed import gather_from_ranks, run_on_rank0
    from megatron_rl.distributed.heartbeats import watch_for_lost_ranks
    from megatron_rl.distributed.launch_store import share_before_start
    from megatron_rl.mcore.model import start_megatron
    from megatron_rl.precision.contract import PrecisionContract
    from megatron_rl.sync.plan import SyncPlan
    from parallel.layout import Layout
    from support.geometries import small_model

    parts, layout = {}, Layout(dp=size)

    def measure(name, call, repeats=REPEATS, clock=time.perf_counter):
        started, sent = clock(), count_sent()
        for _ in range(repeats):
            call()
        parts[name] = (clock() - started) / repeats, (count_sent() - sent) / repeats

    share_before_start("imported", lambda: None, None)  # all ranks are here
    measure("start", lambda: start_megatron(layout, 0), 1)
    run_on_rank0(lambda: None)
    measure("barrier", lambda: run_on_rank0(lambda: None))
    measure("gather", lambda: gather_from_ranks(1, int))
    gradient = torch.zeros(1 << 20)
    measure("sum of 4 MB", lambda: dist.all_reduce(gradient))
    model = small_model(layers=36, hidden=4096, heads=32, kv_heads=8, ffn=12288, vocab=151936)
    contract, rank = PrecisionContract.from_config(PrecisionConfig()), dist.get_rank()
    measure("plan", lambda: SyncPlan.make(model, layout, (1, 1, size), contract, 1 << 28, rank), 1, time.process_time)
    run_on_rank0(lambda: None)
    with watch_for_lost_ranks(180.0, print):
        measure("heartbeats", lambda: time.sleep(60), 1)
    run_on_rank0(lambda: None)
    return parts


def measure_nodes(size, folder):
    """Return the largest value of any rank, and that of rank 0, for each part."""
    with Cluster(size, folder) as nodes:
        place = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(PORT),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        starts = [
            node.start(folder / node.name, "support.node_scaling", "rank", size, RANK=str(rank), **place) for rank, node in enumerate(nodes)
        ]
        done = [finish(command, LONG) for command in starts]
    assert not any(each.code for each in done), "\n".join(each.err for each in done)
    ranks = [json.loads(each.out.splitlines()[-1]) for each in done]
    return {
        name: {"seconds": max(rank[name][0] for rank in ranks), "sent": [ranks[0][name][1], max(rank[name][1] for rank in ranks)]}
        for name in ranks[0]
    }


def main():
    if sys.argv[1] == "rank":
        print(json.dumps(measure_rank(int(sys.argv[2]))))
        return
    for size in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            for name, found in measure_nodes(size, Path(folder)).items():
                sent = " ".join(f"{count:>12,.0f}" for count in found["sent"])
                print(f"{size:>3} nodes  {name:<12} {found['seconds']:>9.4f} s   sent by rank 0's node, by the busiest: {sent}", flush=True)


if __name__ == "__main__":
    main()
