"""Whole runs over nodes that share nothing but a folder: the samples, rewards, and weights of one node, and nothing left behind."""

import json
import sys
import time
from contextlib import ExitStack

import pytest
from support.listening import find_listening
from support.nodes import Cluster
from support.processes import end, until
from support.train_command import TINY, TORCHRUN, finish, latest, make_model, read_numbers, train, wait_for_rows

pytestmark = pytest.mark.timeout(6000)
COMMON = {
    "train.steps": 3,
    "train.learning_rate": 1e-3,
    "train.layout.dp": 2,
    "rollout.engines": 2,
    "sync.transport": "gloo",
    "checkpoint.every": 3,
}
PORT = 29400


@pytest.fixture
def cluster(tmp_path):
    """Start nodes that end with the test."""
    with ExitStack() as clusters:

        def start(count):
            try:
                return clusters.enter_context(Cluster(count, tmp_path))
            except OSError as error:
                pytest.skip(str(error))

        yield start


def launch(nodes, folder, settings, port=PORT, config="quickstart", trainers=None, address="address"):
    """Start a run with one rank per node, or per node of the first `trainers`, by torchrun on each. Return the commands. `address`: the
    field of a node by which others reach it."""
    own = nodes[:trainers]
    arguments = make_model(folder, {**TINY, "model.path": folder / "model", "log.dir": folder / "runs", **settings}, config=config)
    prefixes = {getattr(node, address): " ".join(node.prefix) for node in nodes}
    launchers = "\n".join(prefixes.get(host, "") for host in json.loads(settings["rollout.hosts"]))
    words = [
        "torch.distributed.run",
        f"--nnodes={len(own)}",
        "--nproc-per-node=1",
        f"--master-addr={getattr(nodes[0], address)}",
        f"--master-port={port}",
    ]
    return [
        node.start(
            folder / node.name,
            *words,
            f"--node-rank={rank}",
            "-m",
            "megatron_rl",
            "train",
            *arguments,
            MEGATRON_RL_ENGINE_LAUNCHER=launchers,
        )
        for rank, node in enumerate(own)
    ]


def read_samples(folder):
    return [json.loads(line) for line in (latest(folder) / "samples.jsonl").read_text().splitlines()]


def place(nodes, address="address"):
    """Return the settings of one engine on each node."""
    hosts = ["127.0.0.1", *(getattr(node, address) for node in nodes[1:])]
    return COMMON | {"rollout.hosts": json.dumps(hosts), "sync.host": getattr(nodes[0], address)}


def run_on_one_node(folder, settings):
    """Return the folder of the same run on this machine."""
    ranks = 2 if settings.get("train.layout.dp", 2) == 2 else 1
    done = finish(train(folder, COMMON | settings, launcher=TORCHRUN if ranks == 2 else ()))
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def on_one_node(tmp_path):
    return run_on_one_node(tmp_path / "one", {})


def check(nodes, commands, folder, expected):
    """Wait for a run over nodes. It must end as the one on one node, and leave no process and no file."""
    done = [finish(command) for command in commands]
    assert [each.code for each in done] == [0] * len(commands), "\n".join(each.err for each in done)
    rows, samples = read_numbers(latest(folder)), read_samples(folder)
    assert rows == read_numbers(latest(expected)) and samples == read_samples(expected)
    assert [row.get("mismatch/abs_max", 0) for row in rows[1:]] == [0] * COMMON["train.steps"]
    assert [(node.list_processes(), node.list_files()) for node in nodes] == [([], [])] * len(nodes)


def test_two_nodes_give_the_run_of_one(cluster, on_one_node, tmp_path):
    nodes = cluster(2)
    check(nodes, launch(nodes, tmp_path / "two", place(nodes)), tmp_path / "two", on_one_node)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"placement.kind": "disaggregated", "placement.max_staleness": 1, "algorithm.correction": "tis"},
        {"lora.rank": 8},
        {"sync.delta": "on"},
        {"rollout.engines": 1, "rollout.tp": 2, "rollout.nodes_per_engine": 2},
    ],
    ids=["sampling ahead", "LoRA", "delta", "an engine over both nodes"],
)
def test_runs_of_other_kinds_over_two_nodes_are_those_of_one(cluster, tmp_path, settings):
    nodes = cluster(2)
    here = settings | ({"rollout.nodes_per_engine": 1} if "rollout.tp" in settings else {})
    expected = run_on_one_node(tmp_path / "one", here)
    check(nodes, launch(nodes, tmp_path / "two", place(nodes) | settings), tmp_path / "two", expected)


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


@pytest.mark.long
def test_a_cable_that_is_out_for_five_seconds_changes_nothing(cluster, on_one_node, tmp_path):
    nodes = cluster(2)
    commands = launch(nodes, tmp_path / "two", place(nodes))
    wait_for_rows(commands[0], tmp_path / "two", 2)
    nodes[1].cut()
    time.sleep(5)
    nodes[1].cut(down=False)
    check(nodes, commands, tmp_path / "two", on_one_node)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_dies_stops_the_run_and_a_resumed_run_has_the_same_bits(cluster, on_one_node, tmp_path, lost):
    nodes, folder = cluster(2), tmp_path / "two"
    settings = place(nodes) | {"checkpoint.every": 1, "checkpoint.resume": "auto"}
    commands = launch(nodes, folder, settings)
    wait_for_rows(commands[0], folder, 2)
    end(nodes[lost].list_processes())
    survivor = finish(commands[1 - lost], 300)
    assert survivor.code not in (0, None), survivor.err
    until(lambda: not any(node.list_processes() for node in nodes), 120, "all processes end")
    assert nodes[1 - lost].list_files() == []
    nodes[lost].run("find", "/tmp", "-xdev", "-type", "f", "-delete")  # a node that starts again has an empty one
    check(nodes, launch(nodes, folder, settings, PORT + 1), folder, on_one_node)


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
