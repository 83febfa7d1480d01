"""Whole runs over nodes that share nothing but a folder: the samples, rewards, and weights of one node, and nothing left behind."""

import json

import pytest
from support.nodes import Cluster
from support.train_command import TINY, TORCHRUN, finish, latest, make_model, read_numbers, train

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
    """Start clusters that end with the test."""
    clusters = []

    def start(count):
        clusters.append(Cluster(count, tmp_path))
        try:
            return clusters[-1].__enter__()
        except OSError as error:
            pytest.skip(str(error))

    yield start
    for each in clusters:
        each.__exit__()


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


def test_two_nodes_give_the_run_of_one(cluster, tmp_path):
    one = finish(train(tmp_path / "one", COMMON, launcher=TORCHRUN))
    assert one.code == 0, one.err
    nodes = cluster(2)
    placed = {"rollout.hosts": json.dumps(["127.0.0.1", nodes[1].address]), "sync.host": nodes[0].address}
    done = [finish(command) for command in launch(nodes, tmp_path / "two", COMMON | placed)]
    assert [each.code for each in done] == [0, 0], done[0].err + done[1].err
    assert read_numbers(latest(tmp_path / "two")) == read_numbers(latest(tmp_path / "one"))
    assert read_samples(tmp_path / "two") == read_samples(tmp_path / "one")
    assert [row["mismatch/abs_max"] for row in read_numbers(latest(tmp_path / "two"))[1:]] == [0] * 3
    assert [(node.list_processes(), node.list_files()) for node in nodes] == [([], [])] * 2
