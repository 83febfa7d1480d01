"""Placement of engines: their nodes, devices and launch commands. Imports without torch. Engines are spread evenly over the nodes of
`rollout.hosts`, in order: of four engines on two nodes, 0 and 1 run on the first. An engine that spans `rollout.nodes_per_engine` nodes has
equally many ranks on each, and its rank 0 and HTTP server on the first."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.config.hosts import is_loopback
from megatron_rl.config.launch import read_launch

LAUNCHER_VARIABLE = "MEGATRON_RL_ENGINE_LAUNCHER"
"""Environment variable with the command prefixes that start an engine on another machine, such as `srun --nodelist=node2`: one line per
entry of `rollout.hosts`, empty for this machine (launch/slurm/common.sh). The command must end the engine on SIGTERM and pass the
environment on."""


@dataclass(frozen=True)
class EnginePlacement:
    """Placement of an engine's ranks on one of its nodes."""

    host: str = "127.0.0.1"  # address that the node listens on
    launcher: str = ""  # prefix of the launch command, or empty on this machine
    index: int = 0  # index among the engines of the node, which take the node's devices in order
    node: int = 0  # index among the nodes of the engine


def place_engine(rollout: RolloutConfig, number: int) -> list[EnginePlacement]:
    """Return the placement of engine `number` on each of its nodes. A successor of a lost engine gets the same placement."""
    group, index = divmod(number, rollout.engines_per_node)
    first, launchers = group * rollout.nodes_per_engine, list_launchers()
    launchers += [""] * (len(rollout.hosts) - len(launchers))
    nodes = range(first, first + rollout.nodes_per_engine)
    return [EnginePlacement(rollout.hosts[node], launchers[node], index, node - first) for node in nodes]


def get_base_gpu_id(config: Config, placement: EnginePlacement) -> int:
    """Return the engine's first device on this node, after those of earlier engines and of a disaggregated trainer on this machine."""
    trainer_has_own = config.placement.kind == "disaggregated" and not placement.launcher
    return (read_launch().local_size if trainer_has_own else 0) + placement.index * config.rollout.ranks_per_node


def find_meeting_host(placements: Sequence[EnginePlacement], own_host: str) -> str:
    """Return the address at which all ranks of an engine reach its first node. `own_host`: address of this machine for other nodes."""
    first, *others = (placement.host for placement in placements)
    return own_host if is_loopback(first) and not all(map(is_loopback, others)) else first


def count_ranks_on_machine(rollout: RolloutConfig, placement: EnginePlacement) -> int:
    """Return how many engine ranks share the cores of this node's machine. All nodes with loopback addresses are this machine."""
    loopbacks = sum(map(is_loopback, rollout.hosts))
    return rollout.engines_per_node * rollout.ranks_per_node * (loopbacks if is_loopback(placement.host) else 1)


def list_launchers() -> list[str]:
    """Return the lines of LAUNCHER_VARIABLE, or one empty line if it is not set."""
    return [line.strip() for line in os.environ.get(LAUNCHER_VARIABLE, "").split("\n")]
