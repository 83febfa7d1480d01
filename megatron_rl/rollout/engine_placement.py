"""Where each engine runs: on which node, by whom it is started there, and on which devices of it. Imports without torch.

Engines are spread evenly over the nodes of `rollout.hosts`, in order: of four engines on two nodes, 0 and 1 run on the first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.errors import UserError

LAUNCHER_VARIABLE = "MEGATRON_RL_ENGINE_LAUNCHER"
"""Words before an engine's command that run it on another machine, such as `srun --nodelist=node2`: a line for each of `rollout.hosts`,
an empty one for this machine; see launch/slurm/common.sh. They must end the engine when they are sent SIGTERM, hand on the
environment, and see the folders that this machine sees."""


@dataclass(frozen=True)
class EnginePlacement:
    """The place of one engine."""

    host: str = "127.0.0.1"
    """The address that it listens on."""
    launcher: str = ""
    """Words before its command; none on this machine."""
    index: int = 0
    """Its number among the engines of its node, which take the node's devices in this order."""
    engines_on_node: int = 1
    """Engines of its node, itself included."""


def place_engine(rollout: RolloutConfig, number: int) -> EnginePlacement:
    """The slot of engine `number` of a run, the same whenever one is started there."""
    node, index = divmod(number, rollout.engines_per_node)
    launchers = _launchers()
    return EnginePlacement(rollout.hosts[node], launchers[node] if node < len(launchers) else "", index, rollout.engines_per_node)


def get_base_gpu_id(config: Config, slot: EnginePlacement) -> int:
    """The first of the `rollout.tp` devices of its node that an engine has: after those of the engines before it, and of the trainer's
    ranks where these are on this machine and keep their devices to themselves."""
    alone = config.placement.kind == "disaggregated" and not slot.launcher
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)  # without torchrun there is one rank
    return (ranks if alone else 0) + slot.index * config.rollout.tp


def check_engine_placement(config: Config) -> None:
    """Raises UserError where engines would share devices, because nobody starts them on the other nodes, or where the weights cannot
    get there."""
    hosts = config.rollout.hosts
    launchers = _launchers()[: len(hosts)]
    if len(launchers) < len(hosts):
        rule = f"names {len(hosts)} nodes, {LAUNCHER_VARIABLE} has words for {len(launchers)} of them"
        raise UserError("rollout.hosts", list(hosts), rule, "start with launch/slurm, or give the variable a line for each node")
    if twice := [line for line in launchers if launchers.count(line) > 1]:
        where = f"by {twice[0]!r}" if twice[0] else "on this machine"
        rule = f"starts the engines of two nodes {where}, on the same devices"
        raise UserError(LAUNCHER_VARIABLE, None, rule, "give it a line of its own for each of rollout.hosts")
    if any(launchers) and config.sync.transport in ("shared_memory", "cuda_ipc"):
        rule = f"needs trainer and engines on one host, {LAUNCHER_VARIABLE} starts engines on others"
        raise UserError("sync.transport", config.sync.transport, rule, "use process_group, gloo, or disk with a shared folder")


def _launchers() -> list[str]:
    return [line.strip() for line in os.environ.get(LAUNCHER_VARIABLE, "").split("\n")]
