"""Ranks in two network namespaces, joined by a cable, in which a node's own name is a loopback address, as on Debian."""

import os
import re
import subprocess
import sys

import pytest
from support.processes import ROOT, free_port, one_thread_environment

ADDRESSES = [("10.213.78.1/24", "10.213.78.2/24"), ("fd00:78::1/64", "fd00:78::2/64")]
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
    """The prefixes of commands on two nodes, with both names of each node in its hosts file."""
    names, folder = [f"mrl{os.getpid()}{side}" for side in "ab"], tmp_path_factory.mktemp("hosts")

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {error}")
    prefixes = []
    for side, name in enumerate(names):
        ip("-n", name, "link", "set", "lo", "up")
        for pair in ADDRESSES:
            at_once = ["nodad"] if ":" in pair[side] else []  # IPv6 would first look for other owners of the address
            ip("-n", name, "addr", "add", pair[side], "dev", name, *at_once)
        ip("-n", name, "link", "set", name, "up")
        other = ADDRESSES[0][1 - side].partition("/")[0]
        hosts = folder / name
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{side}\n{other} node{1 - side}\n")
        own_names = f"hostname node{side}; mount --bind {hosts} /etc/hosts"
        prefixes.append(f"ip netns exec {name} unshare -u -m sh -c '{own_names}; exec \"$@\"' sh")
    yield prefixes
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False)


def join(nodes, master, seconds=60, **variables):
    """Return the exit code and the output of each rank."""
    launch = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
    ranks = []
    for rank, prefix in enumerate(nodes):
        environment = one_thread_environment() | launch | variables | {"RANK": str(rank)}
        words = ["sh", "-c", f'{prefix} "$0" -c "$1" {seconds}', sys.executable, CODE]
        ranks.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    texts = [rank.communicate(timeout=300) for rank in ranks]
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize("master", ["10.213.78.1", "node0", "fd00:78::1"])
def test_ranks_meet_at_the_addresses_that_reach_each_other(nodes, master):
    for code, out, err in join(nodes, master):
        assert (code, out) == (0, "sum 2.0\n"), err


def test_an_interface_that_does_not_reach_the_others_is_one_line_that_names_the_remedy(nodes):
    for code, _, err in join(nodes, "10.213.78.1", 8, GLOO_SOCKET_IFNAME="lo"):
        line = r"megatron-rl(?: \[rank 1\])?: rank [01] does not reach the other ranks \(.+\); set GLOO_SOCKET_IFNAME to the interface .*"
        assert code == 3 and re.fullmatch(line, err.strip().splitlines()[-1]) and "Traceback" not in err, err
