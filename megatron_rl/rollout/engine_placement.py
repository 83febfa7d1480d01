"""Where each engine runs: its node, how it is started there, and its devices. Imports without torch.

Engines are spread evenly over the nodes of `rollout.hosts`, in order: of four engines on two nodes, 0 and 1 run on the first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_rl.config import Config, RolloutConfig

LAUNCHER_VARIABLE = "MEGATRON_RL_ENGINE_LAUNCHER"
"""Command prefixes that start an engine on another machine, such as `srun --nodelist=node2`: one line for each of `rollout.hosts`, empty
for this machine; see launch/slurm/common.sh. The prefix must end the engine on SIGTERM, pass the environment on, and see the same
folders as this machine."""


@dataclass(frozen=True)
class EnginePlacement:
    """Where one engine runs."""

    host: str = "127.0.0.1"
    """Address it listens on."""
    launcher: str = ""
    """Prefix of its command; empty on this machine."""
    index: int = 0
    """Its number among the engines of its node, which take the node's devices in order."""


def place_engine(rollout: RolloutConfig, number: int) -> EnginePlacement:
    """Return the placement of engine `number`; a successor gets the same."""
    node, index = divmod(number, rollout.engines_per_node)
    launchers = list_launchers()
    return EnginePlacement(rollout.hosts[node], launchers[node] if node < len(launchers) else "", index)


def get_base_gpu_id(config: Config, placement: EnginePlacement) -> int:
    """Return the first of the engine's `rollout.tp` devices on its node: after those of earlier engines, and after the trainer's if
    the trainer is on this machine and does not share devices."""
    trainer_has_own = config.placement.kind == "disaggregated" and not placement.launcher
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)  # without torchrun there is one rank
    return (ranks if trainer_has_own else 0) + placement.index * config.rollout.tp


def list_launchers() -> list[str]:
    """Return the lines of LAUNCHER_VARIABLE; one empty line where it is not set."""
    return [line.strip() for line in os.environ.get(LAUNCHER_VARIABLE, "").split("\n")]
