"""Whole runs over nodes that share nothing but a folder: the samples, rewards, and weights of one node, and nothing left behind."""

import json
import time
from contextlib import ExitStack

import pytest
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


def launch(nodes, folder, settings, port=PORT, config="quickstart"):
    """Start a run with one rank per node, by torchrun on each. Return the commands."""
    arguments = make_model(folder, {**TINY, "model.path": folder / "model", "log.dir": folder / "runs", **settings}, config=config)
    launchers = "\n".join(["", *(" ".join(node.prefix) for node in nodes[1:])])
    words = [
        "torch.distributed.run",
        f"--nnodes={len(nodes)}",
        "--nproc-per-node=1",
        f"--master-addr={nodes[0].address}",
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
        for rank, node in enumerate(nodes)
    ]


def read_samples(folder):
    return [json.loads(line) for line in (latest(folder) / "samples.jsonl").read_text().splitlines()]


def place(nodes):
    """Return the settings of one engine on each node."""
    hosts = ["127.0.0.1", *(node.address for node in nodes[1:])]
    return COMMON | {"rollout.hosts": json.dumps(hosts), "sync.host": nodes[0].address}


@pytest.fixture
def on_one_node(tmp_path):
    """The folder of the same run on this machine."""
    done = finish(train(tmp_path / "one", COMMON, launcher=TORCHRUN))
    assert done.code == 0, done.err
    return tmp_path / "one"


def check(nodes, commands, folder, expected):
    """Wait for a run over nodes. It must end as the one on one node, and leave no process and no file."""
    done = [finish(command) for command in commands]
    assert [each.code for each in done] == [0] * len(nodes), "\n".join(each.err for each in done)
    rows, samples = read_numbers(latest(folder)), read_samples(folder)
    assert rows == read_numbers(latest(expected)) and samples == read_samples(expected)
    assert [row["mismatch/abs_max"] for row in rows[1:]] == [0] * 3
    assert [(node.list_processes(), node.list_files()) for node in nodes] == [([], [])] * len(nodes)


def test_two_nodes_give_the_run_of_one(cluster, on_one_node, tmp_path):
    nodes = cluster(2)
    check(nodes, launch(nodes, tmp_path / "two", place(nodes)), tmp_path / "two", on_one_node)


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
    assert [node.list_files() for node in nodes] == [[], []]
    check(nodes, launch(nodes, folder, settings, PORT + 1), folder, on_one_node)
