"""Engines on several nodes: placement, launchers, devices and refusals; and the release of a colocated engine's memory."""

import itertools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.families import ARCHITECTURES

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.preflight import Facts, Needs, check
from megatron_rl.rollout import engine_packages, memory_saver
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE, EnginePlacement, count_ranks_on_machine, get_base_gpu_id, place_engine
from rollout_sglang import launch_args

NODES = ("10.0.0.5", "10.0.0.6")


def config(engines: int = 4, tp: int = 1, hosts: tuple[str, ...] = NODES, transport: str = "process_group", nodes: int = 1) -> Config:
    rollout = {"engines": engines, "tp": tp, "hosts": hosts, "nodes_per_engine": nodes}
    sections = {"model": {"path": "x"}, "rollout": rollout, "sync": {"transport": transport, "host": "10.0.0.4"}}
    return Config.model_validate(sections, strict=False)


def check_devices(config: Config, node_gpus: int = 0) -> None:
    with mock.patch.object(engine_packages, "find_missing_packages", list):
        check(Facts(config, node_gpus=node_gpus), Needs.ENGINE | Needs.MACHINE | Needs.NODE)


def start_nodes(monkeypatch, config: Config, number: int) -> tuple[list, str]:
    """Return (arguments, environment, log) of the processes that engine `number` would be started as, and its URL."""
    started: list[tuple[list[str], dict[str, str], Path]] = []
    monkeypatch.setattr(launch_args, "read_config", lambda folder: ARCHITECTURES["qwen3"])
    monkeypatch.setattr(launch_args, "EngineProcess", lambda *parts: started.append(parts))
    url = launch_args.EngineLaunchSpec(config, Path("x"), Path("logs"), number).start_process().url
    return started, url


@pytest.fixture
def launchers(monkeypatch):
    def set_lines(*lines: str) -> None:
        monkeypatch.setenv(LAUNCHER_VARIABLE, "\n".join(lines))

    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    return set_lines


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
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


def test_engines_are_on_this_machine_by_default_and_are_spread_evenly_in_order(launchers):
    local = config(2, hosts=("127.0.0.1",), transport="shared_memory")
    check_devices(local)
    assert [place_engine(local.rollout, number) for number in range(2)] == [[EnginePlacement(index=index)] for index in range(2)]
    launchers("", "srun --nodelist=node2")
    places = ("10.0.0.5", "", 0), ("10.0.0.5", "", 1), ("10.0.0.6", "srun --nodelist=node2", 0), ("10.0.0.6", "srun --nodelist=node2", 1)
    assert [place_engine(config().rollout, number) for number in range(4)] == [[EnginePlacement(*place)] for place in places]


def test_devices_are_counted_from_the_first_of_each_node(launchers, monkeypatch):
    launchers("srun --nodelist=node3", "srun --nodelist=node4")
    spread = config(tp=2)
    environments = [environment for number in range(4) for _, environment, _ in start_nodes(monkeypatch, spread, number)[0]]
    assert [environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") for environment in environments] == [1] * 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    words = [arguments for number in range(4) for arguments, _, _ in start_nodes(monkeypatch, spread, number)[0]]
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
        ports = [int(start_nodes(monkeypatch, neighbors, number)[1].rpartition(":")[2]) for number in range(8)]
        assert [port % 16 for port in ports] == list(range(0, 16, 2)) and 20000 <= min(ports) <= max(ports) < 30000


def test_a_node_has_devices_for_all_its_engines_and_serves_as_many_as_the_others(launchers):
    launchers("srun --nodelist=node2", "srun --nodelist=node3")
    check_devices(config(4, tp=2), 4)
    gpus = "6: needs 3 * 2 GPUs per node (rollout.engines / 2 nodes * rollout.tp), but this machine has 4; lower one of them"
    with pytest.raises(UserError, match=re.escape(f"rollout.engines = {gpus}") + "$"):
        check_devices(config(6, tp=2), 4)
    check_devices(config(1, tp=8, nodes=2), 4)
    with pytest.raises(UserError, match=r"^rollout.engines = 3: must be a multiple of the nodes with engines .*; use 4"):
        check(Facts(config(3, tp=2, nodes=2), engine_nodes=4), Needs.ENGINE | Needs.LAUNCH)


MAPS = """7f2c5a000000-7f2c5a0c1000 r--p 00000000 fe:00 11 /site/nvidia/cu13/lib/libcudart.so.13.0.96
7f2c5b000000-7f2c5b001000 rw-p 00000000 00:00 0
7f2c5c000000-7f2c5c001000 r--p 00000000 fe:00 12 /with a space/libcudart.so.12
7ffd0000-7ffd1000 rw-p 00000000 00:00 0 [stack]
"""


def test_an_engine_finds_the_runtime_that_torch_has_loaded_and_releases_graphs(tmp_path, monkeypatch):
    (maps := tmp_path / "maps").write_text(MAPS)
    assert str(memory_saver.find_cuda_runtime("13.0", maps)) == "/site/nvidia/cu13/lib/libcudart.so.13.0.96"
    assert str(memory_saver.find_cuda_runtime("12.9", maps).parent) == "/with a space"
    assert memory_saver.find_cuda_runtime("14.0", maps) is None and memory_saver.find_cuda_runtime("14.0") is None
    find = memory_saver.find_cuda_runtime
    monkeypatch.setattr(memory_saver, "find_cuda_runtime", lambda cuda: find(cuda, maps))
    variables = memory_saver.make_environment({"LD_LIBRARY_PATH": "/other:"}, "13.0")
    assert variables == {"LD_LIBRARY_PATH": "/site/nvidia/cu13/lib:/other", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}
    assert memory_saver.make_environment({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}, None) == {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}
    memory_saver.check({}, "13.0")


def test_without_the_runtime_a_colocated_run_is_refused():
    memory_saver.check({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None)
    with pytest.raises(UserError, match=r"^placement.kind = 'colocated': .* needs libcudart.so.14, which torch has not loaded; install"):
        memory_saver.check({}, "14.0")
    with pytest.raises(UserError, match="^PYTORCH_ALLOC_CONF = .*expandable segments"):
        memory_saver.check({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, None)
