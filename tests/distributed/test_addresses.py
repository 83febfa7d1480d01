"""Ranks in two network namespaces, joined by a cable, in which a node's own name is a loopback address, as on Debian."""

import re
import subprocess
import sys
from contextlib import ExitStack

import pytest
from support.nodes import Cluster
from support.processes import ROOT, free_port, one_thread_environment

CODE = """
import datetime, os, sys
import torch, torch.distributed as dist
from megatron_rl.cli.main import expected_errors
from megatron_rl.distributed.launch_store import join_ranks
from parallel.transport.process_group import register_shared_gloo
with expected_errors():
    join_ranks(register_shared_gloo(), datetime.timedelta(seconds=float(sys.argv[1])))
for group in (None, dist.new_group([0, 1])):
    dist.all_reduce(number := torch.ones(1), group=group)
print("sum", number.item())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ExitStack() as clusters:
        try:
            yield clusters.enter_context(Cluster(2, tmp_path_factory.mktemp("nodes")))
        except OSError as error:
            pytest.skip(f"no network namespaces: {error}")


def join(nodes, master, seconds=60, **variables):
    """Return the exit code and the output of each rank."""
    launch = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, node in enumerate(nodes):
        environment = one_thread_environment() | launch | variables | {"RANK": str(rank)}
        words = [*node.prefix, sys.executable, "-c", CODE, str(seconds)]
        ranks.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    texts = [rank.communicate(timeout=300) for rank in ranks]
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize("master", ["address", "name", "address6"])
def test_ranks_meet_at_the_addresses_that_reach_each_other(nodes, master):
    for code, out, err in join(nodes, getattr(nodes[0], master)):
        assert (code, out) == (0, "sum 2.0\n"), err


@pytest.mark.long
def test_an_interface_that_does_not_reach_the_others_is_one_line_that_names_the_remedy(nodes):
    for code, _, err in join(nodes, nodes[0].address, 8, GLOO_SOCKET_IFNAME="lo"):
        line = r"megatron-rl(?: \[rank 1\])?: rank [01] does not reach the other ranks \(.+\); set GLOO_SOCKET_IFNAME to the interface .*"
        assert code == 3 and re.fullmatch(line, err.strip().splitlines()[-1]) and "Traceback" not in err, err
