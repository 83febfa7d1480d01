"""The work of a run (`Workload`), and a placement of trainer and engines that does the work (`Candidate`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, Literal

from megatron_rl.config import Config
from megatron_rl.cost.hardware import Cluster
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import LAYOUTS, PLAN, Facts, Needs, check, find_mistakes
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry

Placement = Literal["colocated", "disaggregated"]
Recompute = Literal["none", "selective", "full"]

MEAN_LENGTH_SHARE = 0.5
"""Mean length of prompts and completions as a share of the longest. An assumption, since nothing has been sampled yet."""
_SIZES = ("tp", "pp", "first_stage_layers", "last_stage_layers", "vpp", "cp", "dp", "ep")


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, its precision and the work of one RL step. Lengths are in tokens. Compared by identity, so that results can be cached.

    `model` includes the multi-token prediction layers that are trained.
    """

    model: ModelGeometry
    config: Config
    hf_config: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: Config, hf_config: Mapping[str, Any]) -> Workload:
        """Raise UserError if the configuration does not fit the model, regardless of the layouts."""
        check(Facts(config, hf_config), PLAN)
        return cls(config.make_trained_geometry(hf_config), config, hf_config)

    @cached_property
    def contract(self) -> PrecisionContract:
        return PrecisionContract.from_config(self.config.precision)

    @property
    def trains_adapters(self) -> bool:
        """Whether only LoRA adapters are trained. The reference is then the same model without its adapters."""
        return self.model.adapters is not None

    @property
    def high_bytes(self) -> int:
        """Bytes per element of the high-precision dtype."""
        return self.contract.high_format.element_bytes

    @property
    def has_reference(self) -> bool:
        return self.config.algorithm.kl_coef > 0

    @cached_property
    def scored(self) -> Workload:
        """The workload of computing log-probs alone, as the reference does: without multi-token prediction layers."""
        return replace(self, model=replace(self.model, trains_mtp=False)) if self.model.trains_mtp else self

    @property
    def trained_mtp_layers(self) -> int:
        """Number of multi-token prediction layers on the last pipeline stage."""
        return self.model.mtp_layers if self.model.trains_mtp else 0

    @property
    def scoring_passes(self) -> int:
        """Forward passes over each token before the updates: policy, reference, teacher."""
        return 1 + self.has_reference + (self.config.teacher is not None)

    @cached_property
    def critic(self) -> Workload | None:
        """The critic's training, or None without a critic: the same decoder with a value head."""
        return replace(self, model=replace(self.scored.model, tied=False, value_head=True)) if self.config.algorithm.has_critic else None

    @cached_property
    def teacher(self) -> Workload | None:
        """The teacher's forward passes, or None without a teacher."""
        teacher = self.config.teacher
        if teacher is None:
            return None
        hf_config = read_config(teacher.path, "teacher.path")
        return replace(self, model=ModelGeometry.from_hf_config(hf_config), hf_config=hf_config)

    @property
    def sequences(self) -> int:
        """Completions sampled in one RL step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size

    @property
    def trained_sequences(self) -> int:
        """Completions that one RL step trains on, including replayed groups."""
        replay = self.config.replay
        return self.sequences + (0 if replay is None else replay.prompts_per_step * self.config.rollout.group_size)

    @property
    def mean_sequence(self) -> float:
        return MEAN_LENGTH_SHARE * self.config.longest_sequence

    def tokens_per_rank(self, cp: int) -> float:
        """Return a rank's tokens in the largest micro-batch: the configured bound, or the rank's part of a single longer sequence."""
        return max(self.config.train.micro_batch_tokens, self.config.longest_sequence / cp)

    @property
    def top_k(self) -> int:
        return self.model.experts.top_k if self.model.experts else 0


@dataclass(frozen=True)
class Candidate:
    """Layouts of the trainer and the engines.

    Colocated: trainer rank g and engine rank g share GPU g. Disaggregated: the engines' GPUs follow the trainer's.
    """

    train: Layout
    rollout_tp: int = 1
    rollout_ep: int = 1
    engines: int = 1
    placement: Placement = "colocated"
    recompute: Recompute = "none"
    """What the backward pass recomputes: nothing, MLPs and experts (`selective`), or everything within a layer (`full`)."""
    nodes_per_engine: int = 1
    """Nodes of one engine. An engine on several nodes has all of their GPUs."""

    @classmethod
    def from_config(cls, config: Config) -> Candidate:
        """Return the configured placement. Raise UserError for sizes that do not form a layout."""
        tp, ep, engines, nodes = config.rollout.to_layout()
        return cls(config.train.layout.to_layout(), tp, ep, engines, config.placement.kind, config.train.recompute, nodes)

    @property
    def rollout(self) -> EngineLayout:
        return EngineLayout(self.rollout_tp, self.rollout_ep, self.engines, self.nodes_per_engine)

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def trainer_only(self) -> Candidate:
        """The candidate without its engines, so that results for the trainer can be cached."""
        return Candidate(self.train, placement=self.placement, recompute=self.recompute)

    @property
    def engine_gpus(self) -> int:
        return self.engines * self.rollout_tp

    @property
    def gpus(self) -> int:
        return max(self.train.world_size, self.engine_gpus) if self.colocated else self.train.world_size + self.engine_gpus

    def engine_gpu(self, rank: int) -> int:
        """Return the GPU of engine rank `rank`, counted over all engines."""
        return rank if self.colocated else self.train.world_size + rank

    def engine_nodes(self, cluster: Cluster) -> int:
        return len({cluster.node_of(self.engine_gpu(rank)) for rank in range(self.engine_gpus)})

    def check_on(self, cluster: Cluster, job: Workload) -> None:
        """Raise UserError if the layouts do not fit the model or need more GPUs than the cluster has."""
        check(self.facts(job, cluster), PLAN | LAYOUTS, about=LAYOUTS)
        if self.gpus > cluster.gpus:
            raise UserError("train.layout", None, f"needs {self.gpus} GPUs, {cluster} have {cluster.gpus}", "give more --nodes")

    def find_launch_problem(self, job: Workload, cluster: Cluster) -> str:
        """Return why no batch script of launch/slurm starts this candidate, or "" if one does.

        The scripts start the same number of ranks on every trainer node, and of engines on every engine node.
        """
        engine_nodes = cluster.nodes if self.colocated else self.engine_nodes(cluster)
        trainer_nodes = cluster.nodes if self.colocated else cluster.nodes - engine_nodes
        ranks = min(self.train.world_size, cluster.gpus_per_node) * trainer_nodes
        facts = replace(self.facts(job, cluster), ranks=ranks, engine_nodes=engine_nodes)
        return next((str(error) for _, error in find_mistakes(facts, LAYOUTS | Needs.LAUNCH, about=Needs.LAUNCH)), "")

    def facts(self, job: Workload, cluster: Cluster) -> Facts:
        gpus, capability = cluster.gpus_per_node, cluster.gpu.capability
        layouts = Facts(job.config, job.hf_config, geometry=job.model, trainer=self.train, rollout=self.rollout)
        return replace(layouts, node_gpus=gpus, capability=capability)

    def at_once(self, job: Workload, trains: bool) -> int:
        """Return how many micro-batches take turns in a training pass or, without `trains`, in a forward pass."""
        return job.config.train.count_at_once(self.train, job.contract.trainer_format.quantized, trains, self.recompute)

    def micro_batches(self, job: Workload) -> int:
        tokens = job.trained_sequences * job.mean_sequence / job.config.algorithm.updates_per_step
        return max(1, math.ceil(tokens / (self.train.dp * self.train.cp * job.tokens_per_rank(self.train.cp))))

    def overrides(self, config: Config) -> list[str]:
        """Return the command-line overrides that turn `config` into this candidate."""
        layout, configured = self.train, config.train.layout
        fields: dict[str, object] = {f"train.layout.{name}": getattr(layout, name) for name in _SIZES}
        if layout.etp != (configured.etp or layout.tp):
            fields["train.layout.etp"] = layout.etp
        fields |= {"train.recompute": self.recompute, "placement.kind": self.placement}
        fields |= {"rollout.tp": self.rollout_tp, "rollout.ep": self.rollout_ep, "rollout.engines": self.engines}
        fields["rollout.nodes_per_engine"] = self.nodes_per_engine
        staleness = 0 if self.colocated else config.placement.max_staleness or 1  # generation goes on while the trainer trains
        fields["placement.max_staleness"] = staleness
        placement = config.placement.model_copy(update={"max_staleness": staleness})
        for rule, _ in find_mistakes(Facts(config.model_copy(update={"placement": placement})), Needs.TRAINER):
            fields |= rule.correction
        return [f"--{path}={value}" for path, value in fields.items() if reduce(getattr, path.split("."), config) != value]

    def describe(self) -> str:
        """Return the trainer's layout as in `tp 4 pp 2 dp 4`. Sizes of 1 are omitted; `first 3 last 3` are the layers of those stages."""
        layout = self.train
        words = [f"{name.removesuffix('_stage_layers')} {size}" for name in _SIZES if (size := getattr(layout, name)) > 1]
        words += [f"etp {layout.etp}"] * (layout.etp != layout.tp) + [f"recompute {self.recompute}"] * (self.recompute != "none")
        return " ".join(words or ["one rank"])

    def describe_engines(self) -> str:
        """Return the engines as in `4 x tp 16 ep 16 on 2 nodes each`. Sizes of 1 are omitted."""
        ep = f" ep {self.rollout_ep}" if self.rollout_ep > 1 else ""
        return f"{self.engines} x tp {self.rollout_tp}{ep}" + f" on {self.nodes_per_engine} nodes each" * (self.nodes_per_engine > 1)
