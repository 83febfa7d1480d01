"""Whole runs over nodes that share nothing but a folder: the samples, rewards, and weights of one node, and nothing left behind."""

import json
import os
import signal
import sys
import time

import pytest
from support.listening import find_listening
from support.node_runs import COMMON, PORT, check, launch, place, place_engines, run_on_one_node, wait_for_phase
from support.train_command import TORCHRUN, finish, train, wait_for_rows

pytestmark = pytest.mark.timeout(6000)


def test_two_nodes_give_the_run_of_one(cluster, on_one_node, tmp_path):
    nodes = cluster(2)
    check(nodes, launch(nodes, tmp_path / "two", place(nodes)), tmp_path / "two", on_one_node)


def test_engines_on_another_node_whose_cable_is_out_for_five_seconds_change_nothing(cluster, on_one_node, tmp_path):
    nodes, folder = cluster(2), tmp_path / "two"
    commands = launch(nodes, folder, place_engines(nodes))
    wait_for_phase(commands, folder, "sync")
    nodes[1].cut()
    time.sleep(5)
    nodes[1].cut(down=False)
    check(nodes, commands, folder, on_one_node)


@pytest.mark.long
@pytest.mark.parametrize("first", [1, 2])
def test_a_run_resumes_on_another_number_of_nodes(first, cluster, on_one_node, tmp_path):
    nodes, folder = cluster(2), tmp_path / "run"
    resumed = {"checkpoint.every": 1, "checkpoint.resume": "auto"}
    starts = [lambda: [train(folder, COMMON | resumed, launcher=TORCHRUN)], lambda: launch(nodes, folder, place(nodes) | resumed)]
    begin, go_on = starts if first == 1 else starts[::-1]
    commands = begin()
    wait_for_rows(commands[0], folder, 2)
    for command in commands:
        os.kill(command.pid, signal.SIGTERM)
    assert all(finish(command).code for command in commands)
    check(nodes, go_on(), folder, on_one_node)


@pytest.mark.long
def test_nodes_without_names_that_share_an_address_on_an_interface_without_a_route(cluster, on_one_node, tmp_path):
    """As with a bridge for containers on each node."""
    nodes, folder = cluster(2), tmp_path / "two"
    for number, node in enumerate(nodes):
        for words in ("link add bridge0 type bridge", "addr add 172.17.0.1/16 dev bridge0", "link set bridge0 up"):
            node.run("ip", *words.split())
        (tmp_path / f"hosts{number}").write_text("127.0.0.1 localhost\n")
    check(nodes, launch(nodes, folder, place(nodes)), folder, on_one_node)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"placement.kind": "disaggregated", "placement.max_staleness": 1, "algorithm.correction": "tis"},
        {"lora.rank": 8},
        {"sync.delta": "on"},
        {"rollout.engines": 1, "rollout.tp": 2, "rollout.nodes_per_engine": 2},
        {"rollout.engines": 1, "rollout.tp": 2, "rollout.nodes_per_engine": 2, "rollout.hosts": "the server away from rank 0"},
    ],
    ids=["sampling ahead", "LoRA", "delta", "an engine over both nodes", "its server away from rank 0"],
)
def test_runs_of_other_kinds_over_two_nodes_are_those_of_one(cluster, tmp_path, settings):
    nodes, folder = cluster(2), tmp_path / "two"
    own = {name: value for name, value in settings.items() if name != "rollout.hosts"}
    away = {"rollout.hosts": json.dumps([nodes[1].address, "127.0.0.1"])} if own != settings else {}
    expected = run_on_one_node(tmp_path / "one", own | ({"rollout.nodes_per_engine": 1} if "rollout.tp" in own else {}))
    check(nodes, launch(nodes, folder, place(nodes) | own | away), folder, expected)


@pytest.mark.long
def test_nodes_that_have_ipv6_alone_give_the_run_of_one(cluster, on_one_node, tmp_path):
    nodes = cluster(2)
    for node in nodes:
        node.run("ip", "-4", "addr", "flush", "dev", "eth0")
    check(nodes, launch(nodes, tmp_path / "two", place(nodes, "address6"), address="address6"), tmp_path / "two", on_one_node)


@pytest.mark.long
def test_engines_on_nodes_of_their_own_give_the_run_of_one(cluster, tmp_path):
    nodes, alone = cluster(3), {"train.layout.dp": 1, "placement.kind": "disaggregated"}
    expected = run_on_one_node(tmp_path / "one", alone)
    hosts = json.dumps([node.address for node in nodes[1:]])
    settings = place(nodes) | alone | {"rollout.hosts": hosts}
    check(nodes, launch(nodes, tmp_path / "three", settings, trainers=1), tmp_path / "three", expected)


ASK = """
import sys, urllib.error, urllib.request
for address in sys.argv[1:]:
    for path, headers in (("generate", {}), ("weights_checker", {}), ("generate", {"Authorization": "Bearer guessed"})):
        request = urllib.request.Request(f"http://{address}/{path}", b"{}", {"Content-Type": "application/json", **headers})
        try:
            print(urllib.request.urlopen(request, timeout=60).status)
        except urllib.error.HTTPError as error:
            print(error.code)
        except OSError:
            print("other")  # it does not speak HTTP
"""


@pytest.mark.long
def test_a_stranger_in_the_network_finds_what_the_page_says_and_samples_nothing(cluster, on_one_node, tmp_path):
    """Between nodes: torchrun's store on every interface, all other sockets on the node's own address (docs/guides/security.md)."""
    *nodes, stranger = cluster(3)
    commands = launch(nodes, tmp_path / "two", place(nodes))
    wait_for_rows(commands[0], tmp_path / "two", 1)
    servers = []
    for node in nodes:
        for process in node.list_processes():
            words = " ".join(process.cmdline())
            for socket in find_listening([process.pid]):
                host, _, port = socket.address.rpartition(":")
                if not port.isdecimal() or host.startswith("127.") or host == "::1":
                    continue
                is_store = "torch.distributed.run" in words and int(port) == PORT
                assert host in (("0.0.0.0", "::") if is_store else (node.address,)), f"{words} listens on {socket.address}"
                servers += [socket.address] if "rollout_sglang.server" in words else []
    answers = stranger.run(sys.executable, "-c", ASK, *dict.fromkeys(servers)).split()
    assert servers and answers.count("401") == 3, answers
    check(nodes, commands, tmp_path / "two", on_one_node)
