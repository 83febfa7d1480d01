"""One way of placing a run on a cluster, and the workload that it is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.architecture import Routing, traits_of
from megatron_rl.config import Config
from megatron_rl.plan.hardware import Cluster
from megatron_rl.precision import PrecisionContract
from parallel.geometry import ModelGeometry
from parallel.layout import Layout

Placement = Literal["colocated", "disaggregated"]

MEAN_SHARE = 0.5
"""Mean length of prompts and answers, as a share of the longest ones: an assumption, as nothing was sampled yet."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is planned: a model, its precision, and the workload of one RL step. Lengths in tokens. Two are never equal, so that what is
    computed for one can be kept."""

    model: ModelGeometry
    routing: Routing | None
    config: Config
    positions: int
    """Longest sequence that the model takes."""

    @classmethod
    def of(cls, config: Config, hf_config: dict[str, Any]) -> Job:
        geometry = ModelGeometry.from_hf_config(hf_config)
        return cls(geometry, traits_of(hf_config).routing, config, int(hf_config.get("max_position_embeddings", 0)))

    @property
    def contract(self) -> PrecisionContract:
        return PrecisionContract.of(self.config.precision)

    @property
    def high_bytes(self) -> int:
        return 2 if self.config.precision.high == "bf16" else 4

    @property
    def reference(self) -> bool:
        return self.config.algorithm.kl_coef > 0

    @property
    def sequences(self) -> int:
        """Completions of one RL step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @property
    def longest(self) -> int:
        said = self.config.environment.max_tokens if self.config.environment else 0
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens + said

    @property
    def mean_answer(self) -> float:
        return MEAN_SHARE * self.config.rollout.max_new_tokens

    @property
    def mean_sequence(self) -> float:
        return MEAN_SHARE * self.longest

    @property
    def places(self) -> int:
        """Tokens of the largest micro-batch: the bound, or one sequence that is longer than it."""
        return max(self.config.train.micro_batch_tokens, self.longest)

    @property
    def top_k(self) -> int:
        return self.routing.top_k if self.routing else 0


@dataclass(frozen=True)
class Candidate:
    """Layouts of trainer and engines. Colocated, trainer rank g and engine rank g share GPU g; else the engines' GPUs follow the trainer's."""

    train: Layout
    rollout_tp: int = 1
    rollout_ep: int = 1
    engines: int = 1
    placement: Placement = "colocated"
    sharded_optimizer: bool = False
    """Megatron's distributed optimizer: masters and moments are cut over the replicas."""
    recompute: bool = False
    """Every layer's forward pass is run again in the backward pass; only its input is kept."""

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def engine_gpus(self) -> int:
        return self.engines * self.rollout_tp

    @property
    def gpus(self) -> int:
        return max(self.train.world_size, self.engine_gpus) if self.colocated else self.train.world_size + self.engine_gpus

    def engine_gpu(self, rank: int) -> int:
        """The GPU of engine rank `rank`, counted over all engines."""
        return rank if self.colocated else self.train.world_size + rank

    @property
    def stages(self) -> list[int]:
        """The pipeline stages among which the fullest is: the first has the embedding and the most micro-batches in flight, the last
        the logits; the second stands for the others, of which it has the most in flight."""
        return sorted({0, min(1, self.train.pp - 1), self.train.pp - 1})

    def micro_batches(self, job: Job) -> int:
        """Of each replica in one optimizer step."""
        tokens = job.sequences * job.mean_sequence / job.config.algorithm.updates_per_step
        return max(1, -(-int(tokens) // (self.train.dp * job.places)))

    def overrides(self) -> list[str]:
        """What to put behind a command to run this: only fields that the configuration has."""
        layout = self.train
        wanted = {f"train.layout.{name}": getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "dp")}
        if layout.ep > 1 or layout.etp != layout.tp:
            wanted |= {"train.layout.ep": layout.ep, "train.layout.etp": layout.etp}
        wanted |= {"rollout.tp": self.rollout_tp, "rollout.ep": self.rollout_ep}
        return [f"--{field}={value}" for field, value in wanted.items() if is_field(field)]

    def words(self) -> str:
        """`tp 4 pp 2 dp 4`, sizes of 1 left out."""
        layout = self.train
        sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp}
        shown = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if layout.etp != layout.tp:
            shown.append(f"etp {layout.etp}")
        extras = ["sharded optimizer"] * self.sharded_optimizer + ["recompute"] * self.recompute
        return " ".join(shown or ["one rank"]) + "".join(f", {extra}" for extra in extras)

    def engine_words(self) -> str:
        return f"{self.engines} x tp {self.rollout_tp}" + (f" ep {self.rollout_ep}" if self.rollout_ep > 1 else "")


def is_field(path: str) -> bool:
    """Whether the configuration has this field today."""
    section: Any = Config
    for name in path.split("."):
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:
            return False
        section = field.annotation
    return True


def check_cluster(candidate: Candidate, cluster: Cluster) -> str:
    """Why the candidate does not go into the cluster; "" where it does."""
    if candidate.gpus > cluster.gpus:
        return f"needs {candidate.gpus} GPUs, the cluster has {cluster.gpus}"
    if candidate.rollout_tp > cluster.gpus_per_node:
        return f"an engine of {candidate.rollout_tp} ranks is larger than a node"
    return ""
