"""One way of placing a run on a cluster, and the workload that it is planned for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_rl.config import Config
from megatron_rl.config.cross_checks import find_staleness_conflicts, longest_sequence
from megatron_rl.hf.config import RoutingConfig, parse_forward_config
from megatron_rl.planner.hardware import Cluster
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

Placement = Literal["colocated", "disaggregated"]
Recompute = Literal["none", "selective", "full"]

MEAN_LENGTH_SHARE = 0.5
"""Mean length of prompts and answers, as a share of the longest ones: an assumption, as nothing was sampled yet."""


@dataclass(frozen=True, eq=False)
class Workload:
    """What is planned: a model, its precision, and the workload of one RL step. Lengths in tokens. Two are never equal, so that what is
    computed for one can be kept."""

    model: ModelGeometry
    routing: RoutingConfig | None
    config: Config
    max_positions: int
    """Longest sequence that the model takes."""
    sharded_optimizer: bool = False
    """Replicas share masters and moments (Megatron's distributed optimizer)."""
    dense_sequence_parallel: bool = False
    """Tensor parallel ranks of a dense model share the tokens where each is computed by itself (sequence parallelism)."""

    @classmethod
    def from_config(cls, config: Config, hf_config: dict[str, Any]) -> Workload:
        """Raises UserError or GeometryError for a model that the trainer does not build."""
        return cls(
            ModelGeometry.from_hf_config(hf_config),
            parse_forward_config(hf_config).routing,
            config,
            max_positions=int(hf_config.get("max_position_embeddings", 0)),
            sharded_optimizer=get_setting(config, "train.distributed_optimizer", False),
            dense_sequence_parallel=get_setting(config, "train.layout.sequence_parallel", False),
        )

    @cached_property
    def contract(self) -> PrecisionContract:
        return PrecisionContract.from_config(self.config.precision)

    @property
    def high_bytes(self) -> int:
        return 2 if self.config.precision.high == "bf16" else 4

    @property
    def has_reference(self) -> bool:
        return self.config.algorithm.kl_coef > 0

    @property
    def sequences(self) -> int:
        """Completions of one RL step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @property
    def max_sequence(self) -> int:
        return longest_sequence(self.config)

    @property
    def mean_answer(self) -> float:
        return MEAN_LENGTH_SHARE * self.config.rollout.max_new_tokens

    @property
    def mean_sequence(self) -> float:
        return MEAN_LENGTH_SHARE * self.max_sequence

    def tokens_per_rank(self, cp: int) -> float:
        """Tokens of a rank in the largest micro-batch: the bound, or its part of one sequence that is longer than it."""
        return max(self.config.train.micro_batch_tokens, self.max_sequence / cp)

    @property
    def top_k(self) -> int:
        return self.routing.top_k if self.routing else 0

    def uses_sequence_parallel(self, tp: int) -> bool:
        """Megatron's experts need it beside tensor parallelism."""
        return tp > 1 and (self.model.experts is not None or self.dense_sequence_parallel)


@dataclass(frozen=True)
class Candidate:
    """Layouts of trainer and engines. Colocated, trainer rank g and engine rank g share GPU g; disaggregated, the engines' GPUs follow
    the trainer's."""

    train: Layout
    rollout_tp: int = 1
    rollout_ep: int = 1
    engines: int = 1
    placement: Placement = "colocated"
    recompute: Recompute = "none"
    """What the backward pass computes anew instead of keeping it: MLPs and experts (`selective`), or all within a layer (`full`)."""

    @classmethod
    def from_config(cls, config: Config, cluster: Cluster) -> Candidate:
        """What the configuration says. Where it has no field for them, placement and number of engines are those that fill the cluster.
        Raises GeometryError for sizes that are no layout."""
        sizes = config.train.layout
        vpp, cp = (int(get_setting(config, f"train.layout.{name}", 1)) for name in ("vpp", "cp"))
        layout = Layout(tp=sizes.tp, pp=sizes.pp, vpp=vpp, ep=sizes.ep, etp=sizes.etp or 0, dp=sizes.dp, cp=cp)
        placement = get_setting(config, "placement.kind", "colocated" if layout.world_size >= cluster.gpus else "disaggregated")
        left = cluster.gpus - (0 if placement == "colocated" else layout.world_size)
        engines = get_setting(config, "rollout.engines", max(1, left // config.rollout.tp))
        return cls(layout, config.rollout.tp, config.rollout.ep, engines, placement, get_setting(config, "train.recompute", "none"))

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def trainer_only(self) -> Candidate:
        """The trainer's side of it: the same for all engines, so that what is computed of it can be kept."""
        return Candidate(self.train, placement=self.placement, recompute=self.recompute)

    @property
    def engine_gpus(self) -> int:
        return self.engines * self.rollout_tp

    def engine_nodes(self, cluster: Cluster) -> int:
        """Nodes that have a GPU of an engine."""
        return len({cluster.node_of(self.engine_gpu(rank)) for rank in range(self.engine_gpus)})

    def find_launch_problem(self, cluster: Cluster) -> str:
        """Why no batch script of launch/slurm starts it: there the trainer's ranks fill their nodes, and every node that has engines has
        as many. "" where one does."""
        served = self.engine_nodes(cluster)
        trained, served = (cluster.nodes, cluster.nodes) if self.colocated else (cluster.nodes - served, served)
        if self.train.world_size != min(self.train.world_size, cluster.gpus_per_node) * trained:
            return "the trainer's ranks do not fill nodes of their own"
        return f"{self.engines} engines are not as many on each of {served} nodes" if self.engines % served else ""

    @property
    def gpus(self) -> int:
        return max(self.train.world_size, self.engine_gpus) if self.colocated else self.train.world_size + self.engine_gpus

    def engine_gpu(self, rank: int) -> int:
        """The GPU of engine rank `rank`, counted over all engines."""
        return rank if self.colocated else self.train.world_size + rank

    @property
    def extreme_stages(self) -> list[int]:
        """The pipeline stages among which the fullest is: the first has the embedding and the most micro-batches in flight, the last
        the logits; the second stands for the others, of which it has the most in flight."""
        return sorted({0, min(1, self.train.pp - 1), self.train.pp - 1})

    def micro_batches(self, job: Workload) -> int:
        """Of each replica in one optimizer step."""
        tokens = job.sequences * job.mean_sequence / job.config.algorithm.updates_per_step
        return max(1, math.ceil(tokens / (self.train.dp * self.train.cp * job.tokens_per_rank(self.train.cp))))

    def overrides(self, config: Config) -> list[str]:
        """What to put behind a command to run this: the fields of the configuration that say otherwise."""
        layout = self.train
        wanted: dict[str, object] = {f"train.layout.{name}": getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "dp", "ep")}
        configured = config.train.layout
        if layout.etp != (configured.etp or layout.tp):
            wanted["train.layout.etp"] = layout.etp
        wanted |= {"train.recompute": self.recompute, "placement.kind": self.placement}
        wanted |= {"rollout.tp": self.rollout_tp, "rollout.ep": self.rollout_ep, "rollout.engines": self.engines}
        staleness = 0 if self.colocated else config.placement.max_staleness or 1  # generation goes on while the trainer trains
        wanted["placement.max_staleness"] = staleness
        for _, mended in find_staleness_conflicts(config, staleness):
            wanted |= mended
        return [f"--{field}={value}" for field, value in wanted.items() if has_field(field) and get_setting(config, field, None) != value]

    def describe(self) -> str:
        """`tp 4 pp 2 dp 4`, sizes of 1 left out."""
        layout = self.train
        sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep}
        shown = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if layout.etp != layout.tp:
            shown.append(f"etp {layout.etp}")
        if self.recompute != "none":
            shown.append(f"recompute {self.recompute}")
        return " ".join(shown or ["one rank"])

    def describe_engines(self) -> str:
        """`4 x tp 8 ep 8`."""
        return f"{self.engines} x tp {self.rollout_tp}" + (f" ep {self.rollout_ep}" if self.rollout_ep > 1 else "")


def get_setting(config: Config, path: str, default: Any) -> Any:
    """The value of a field, or `default` where the configuration has no such field."""
    if not has_field(path):
        return default
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def has_field(path: str) -> bool:
    """Whether the configuration has this field today."""
    section: Any = Config
    for name in path.split("."):
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:
            return False
        section = field.annotation
    return True
