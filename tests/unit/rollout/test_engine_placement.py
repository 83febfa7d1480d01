"""Engines on several nodes: placement, launchers, devices and refusals."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.preflight import Facts, Needs, check
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE, EnginePlacement, count_ranks_on_machine, get_base_gpu_id, place_engine
from rollout_sglang import launch_args

NODES = ("10.0.0.5", "10.0.0.6")


def config(engines: int = 4, tp: int = 1, hosts: tuple[str, ...] = NODES, transport: str = "process_group", nodes: int = 1) -> Config:
    rollout = {"engines": engines, "tp": tp, "hosts": hosts, "nodes_per_engine": nodes}
    sections = {"model": {"path": "x"}, "rollout": rollout, "sync": {"transport": transport, "host": "10.0.0.4"}}
    return Config.model_validate(sections, strict=False)


def check_devices(config: Config, node_gpus: int = 0) -> None:
    check(Facts(config, node_gpus=node_gpus), Needs.ENGINE | Needs.MACHINE | Needs.NODE)


Started = list[tuple[list[str], dict[str, str], Path]]


def start_nodes(monkeypatch, config: Config, number: int) -> tuple[Started, str]:
    """Return arguments, environment and log of the processes that engine `number` would be started as, and its URL."""
    started: Started = []
    monkeypatch.setattr(launch_args, "read_config", lambda folder: {})
    monkeypatch.setattr(launch_args, "EngineProcess", lambda *parts: started.append(parts))
    url = launch_args.EngineLaunchSpec(config, Path("x"), Path("logs"), number).start_process().url
    return started, url


def start_process(monkeypatch, config: Config, number: int) -> tuple[list[str], dict[str, str], str]:
    """Return arguments and environment of the single process that engine `number` would be started as, and its URL."""
    ((arguments, environment, _),), url = start_nodes(monkeypatch, config, number)
    return arguments, environment, url


@pytest.fixture
def launchers(monkeypatch):
    def set_lines(*lines: str) -> None:
        monkeypatch.setenv(LAUNCHER_VARIABLE, "\n".join(lines))

    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    return set_lines


def test_engines_are_spread_evenly_in_order(launchers):
    launchers("", "srun --nodelist=node2")
    assert [place_engine(config().rollout, number) for number in range(4)] == [
        [EnginePlacement("10.0.0.5", "", 0)],
        [EnginePlacement("10.0.0.5", "", 1)],
        [EnginePlacement("10.0.0.6", "srun --nodelist=node2", 0)],
        [EnginePlacement("10.0.0.6", "srun --nodelist=node2", 1)],
    ]


def test_the_nodes_of_an_engine_meet_at_its_first(launchers, monkeypatch):
    """Four nodes: engines 0 and 1 run on the first two, 2 and 3 on the last two."""
    launchers("", "srun b", "srun c", "srun d")
    spread = config(4, tp=4, hosts=("127.0.0.1", "10.0.0.6", "10.0.0.7", "10.0.0.8"), nodes=2)
    check_devices(spread)
    engines = [start_nodes(monkeypatch, spread, number) for number in range(4)]
    for number, (nodes, url) in enumerate(engines):
        words = [dict(itertools.pairwise(arguments)) for arguments, _, _ in nodes]
        group = number // 2
        assert [node["--host"] for node in words] == list(spread.rollout.hosts[2 * group : 2 * group + 2])
        assert [(node["--nnodes"], node["--node-rank"], node["--tp-size"]) for node in words] == [("2", "0", "4"), ("2", "1", "4")]
        (meeting,) = {node["--dist-init-addr"] for node in words}
        host, _, port = meeting.partition(":")
        assert host == ("10.0.0.4", "10.0.0.7")[group], "others reach this machine by sync.host"
        assert url == f"http://{spread.rollout.hosts[2 * group]}:{words[0]['--port']}" and port != words[0]["--port"]
        assert [environment[LAUNCHER_VARIABLE] for _, environment, _ in nodes] == [["", "srun b"], ["srun c", "srun d"]][group]
        assert [log.name for *_, log in nodes] == [f"engine{number}.log", f"engine{number}.node1.log"]
        keys = {environment["MEGATRON_RL_ENGINE_KEY"] for _, environment, _ in nodes}
        assert len(keys) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (first, second), _ = start_nodes(monkeypatch, spread, 1)
    assert [arguments[arguments.index("--base-gpu-id") + 1] for arguments, *_ in (first, second)] == ["2", "2"]


def test_nodes_on_one_machine_share_its_cores(launchers, monkeypatch):
    launchers("", "env")
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    alone = config(1, tp=4, hosts=("127.0.0.1", "127.0.0.2"), nodes=2)
    nodes, _ = start_nodes(monkeypatch, alone, 0)
    assert [environment["SGLANG_CPU_OMP_THREADS_BIND"] for _, environment, _ in nodes] == ["0|1", "2|3"]
    counts = [count_ranks_on_machine(setup.rollout, place_engine(setup.rollout, 0)[0]) for setup in (alone, config(4, tp=2))]
    assert counts == [4, 4]
    assert nodes[0][0][nodes[0][0].index("--dist-init-addr") + 1].startswith("127.0.0.1:"), "no other machine is to reach it"


def test_without_a_word_all_engines_are_on_this_machine(launchers):
    local = config(2, hosts=("127.0.0.1",), transport="shared_memory")
    check_devices(local)
    expected = [[EnginePlacement(index=index)] for index in range(2)]
    assert [place_engine(local.rollout, number) for number in range(2)] == expected


def test_devices_are_counted_from_the_first_of_each_node(launchers, monkeypatch):
    launchers("srun --nodelist=node3", "srun --nodelist=node4")
    spread = config(tp=2)
    environments = [start_process(monkeypatch, spread, number)[1] for number in range(4)]
    assert [environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") for environment in environments] == [1] * 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = [start_process(monkeypatch, spread, number)[0] for number in range(4)]
    assert [line[line.index("--base-gpu-id") + 1] for line in words] == ["0", "2", "0", "2"]
    assert [line[line.index("--host") + 1] for line in words] == ["10.0.0.5", "10.0.0.5", "10.0.0.6", "10.0.0.6"]


def test_on_one_machine_engines_of_their_own_devices_come_after_the_trainers(launchers, monkeypatch):
    sections = {"model": {"path": "x"}, "rollout": {"engines": 2, "tp": 2}, "placement": {"kind": "disaggregated"}}
    apart = Config.model_validate(sections, strict=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [get_base_gpu_id(apart, place_engine(apart.rollout, number)[0]) for number in range(2)] == [4, 6]
    check_devices(apart, 8)
    with pytest.raises(UserError, match=r"needs 2 \* 2 GPUs per node .* in addition to the trainer's 4, but this machine has 6"):
        check_devices(apart, 6)
    launchers("srun --nodelist=node2")
    assert [get_base_gpu_id(apart, place_engine(apart.rollout, number)[0]) for number in range(2)] == [0, 2]


def test_neighbors_on_another_machine_never_choose_the_same_port(launchers, monkeypatch):
    launchers("srun --nodelist=node2")
    neighbors = config(8, hosts=("10.0.0.5",))
    for _ in range(50):
        ports = [int(start_process(monkeypatch, neighbors, number)[2].rpartition(":")[2]) for number in range(8)]
        assert [port % 16 for port in ports] == list(range(0, 16, 2)) and 20000 <= min(ports) <= max(ports) < 30000


def test_engines_that_cannot_be_where_they_should_are_refused(launchers):
    def refusal(*lines: str, **changes: str) -> str:
        launchers(*lines)
        with pytest.raises(UserError) as error:
            check(Facts(config(**changes)), Needs.ENGINE | Needs.MACHINE | Needs.TRAINER)
        return str(error.value)

    hosts = f"rollout.hosts = ['10.0.0.5', '10.0.0.6']: names 2 nodes, but {LAUNCHER_VARIABLE} has launchers for 1"
    assert refusal("srun --nodelist=node2") == f"{hosts}; start with launch/slurm, or set one line in the variable for each node"
    twice = f"{LAUNCHER_VARIABLE}: starts the engines of two nodes by 'srun a', on the same devices"
    assert refusal("srun a", "srun a") == f"{twice}; set a different line for each entry of rollout.hosts"
    apart = f"sync.transport = 'shared_memory': needs trainer and engines on one host; {LAUNCHER_VARIABLE} starts engines on other hosts"
    assert refusal("", "srun a", transport="shared_memory") == f"{apart}; use process_group, gloo, or disk with a shared folder"


def test_a_node_has_devices_for_all_its_engines_and_serves_as_many_as_the_others(launchers):
    launchers("srun --nodelist=node2", "srun --nodelist=node3")
    check_devices(config(4, tp=2), 4)
    gpus = "6: needs 3 * 2 GPUs per node (rollout.engines / 2 nodes * rollout.tp), but this machine has 4; lower one of them"
    with pytest.raises(UserError, match=re.escape(f"rollout.engines = {gpus}") + "$"):
        check_devices(config(6, tp=2), 4)
    with pytest.raises(UserError, match=r"^rollout.tp = 8: exceeds 4 GPUs per node \* rollout.nodes_per_engine = 4 GPUs; lower it"):
        check_devices(config(2, tp=8), 4)
    check_devices(config(1, tp=8, nodes=2), 4)
    with pytest.raises(UserError, match=r"^rollout.engines = 3: must be a multiple of the nodes with engines .*; use 4"):
        check(Facts(config(3, tp=2, nodes=2), engine_nodes=4), Needs.ENGINE | Needs.LAUNCH)
    with pytest.raises(UserError, match=r"^rollout.engines = 3: must be a multiple of the nodes with engines \(2\), .*; use 4"):
        check(Facts(config(3), engine_nodes=2), Needs.ENGINE | Needs.LAUNCH)
