"""Whole runs over nodes (`nodes.py`): started by torchrun on each node, and compared with the same run on one machine."""

import json
from contextlib import suppress

from support.processes import until
from support.train_command import LONG, TINY, TORCHRUN, finish, latest, make_model, read_json, read_numbers, train

COMMON = {
    "train.steps": 3,
    "train.learning_rate": 1e-3,
    "train.layout.dp": 2,
    "rollout.engines": 2,
    "sync.transport": "gloo",
    "checkpoint.every": 3,
    "reward.function": "support.agent_programs:judge",  # the engines of other nodes keep the columns and score them
    "log.samples": 8,
}
PORT = 29400


def launch(nodes, folder, settings, port=PORT, trainers=None, address="address"):
    """Start a run with one rank per node, or per node of the first `trainers`, by torchrun on each. Return the commands. `address`: the
    field of a node by which others reach it."""
    own = nodes[:trainers]
    arguments = make_model(folder, {**TINY, "model.path": folder / "model", "log.dir": folder / "runs", **settings})
    prefixes = {getattr(node, address): " ".join(node.prefix) for node in nodes}
    launchers = "\n".join(prefixes.get(host, "") for host in json.loads(settings["rollout.hosts"]))
    words = [
        "torch.distributed.run",
        f"--nnodes={len(own)}",
        "--nproc-per-node=1",
        f"--master-addr={getattr(nodes[0], address)}",
        f"--master-port={port}",
    ]
    train = ["-m", "megatron_rl", "train", *arguments]
    starts = [(node, [*words, f"--node-rank={rank}", *train]) for rank, node in enumerate(own)]
    return [node.start(folder / node.name, *command, MEGATRON_RL_ENGINE_LAUNCHER=launchers) for node, command in starts]


def place(nodes, address="address"):
    """Return the settings of one engine on each node."""
    hosts = ["127.0.0.1", *(getattr(node, address) for node in nodes[1:])]
    return COMMON | {"rollout.hosts": json.dumps(hosts), "sync.host": getattr(nodes[0], address)}


def place_engines(nodes):
    """Return the settings of both engines on the second node, away from rank 0."""
    return place(nodes) | {"rollout.hosts": json.dumps([nodes[1].address])}


def run_on_one_node(folder, settings):
    """Return the folder of the same run on this machine."""
    ranks = 2 if settings.get("train.layout.dp", 2) == 2 else 1
    done = finish(train(folder, COMMON | settings, launcher=TORCHRUN if ranks == 2 else ()))
    assert done.code == 0, done.err
    return folder


def read_samples(folder):
    return [json.loads(line) for line in (latest(folder) / "samples.jsonl").read_text().splitlines()]


def compare_rows(run, expected):
    """Assert that the metrics of two runs are the same, without the tests of draws, whose moving sums begin anew when a run resumes."""
    rows, others = read_numbers(run), read_numbers(expected)
    pairs = [(row["step"], key, row.get(key), other.get(key)) for row, other in zip(rows, others, strict=True) for key in {**row, **other}]
    different = [(step, key, value, other) for step, key, value, other in pairs if value != other and not key.startswith("draws/")]
    assert not different, different


def check(nodes, commands, folder, expected):
    """Wait for a run over nodes. It must end as the one on one node, and leave no process and no file."""
    done = [finish(command) for command in commands]
    assert [each.code for each in done] == [0] * len(commands), "\n".join(each.err for each in done)
    compare_rows(latest(folder), latest(expected))
    assert read_samples(folder) == read_samples(expected)
    rows = read_numbers(latest(folder))
    assert [row.get("mismatch/abs_max", 0) for row in rows[1:]] == [0] * len(rows[1:])
    assert all(row["update/abs_mean"] > 0 for row in rows[1:])
    check_empty(nodes)


def check_empty(nodes):
    """Assert that nodes have no process and no file of a run."""
    assert [(node.list_processes(), node.list_files()) for node in nodes] == [([], [])] * len(nodes)


def wait_for_phase(commands, folder, phase, after=1):
    """Wait until rank 0 is in a phase of a step after `after`, and return the step. Raise AssertionError if a command ends first."""
    status, found = latest(folder) / "ranks" / "rank_00000.json", {}

    def is_there():
        if any(command.ended() for command in commands):
            raise AssertionError("\n".join(command.wait(1).err for command in commands if command.ended()))
        with suppress(OSError, ValueError):  # the file is there later, or replaced
            found.update(read_json(status))
        return found.get("phase") == phase and found["step"] > after

    until(is_there, LONG, phase, seconds_between=0.003)
    return found["step"]
