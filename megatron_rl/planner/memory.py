"""Bytes of what a GPU holds as long as a run lasts: exact, from the very shards that trainer and engine are given by `parallel`.

Bytes that the trainer holds of every value of a parameter:

                        FP8 layer in fp8_unified         any other, high = bf16       high = fp32
    weight              4  the FP32 master itself        2                            4  the master itself
    blocks              1 + 4/16384                      -                            -
    operand             as the back end multiplies       -                            -
    gradient            4                                4                            4
    master              -                                4                            -
    Adam's moments      8                                8                            8

With a sharded optimizer a rank holds its replica's share of masters and moments; a weight that is its own master stays whole.
Layers of one kind are alike, so one of each is cut and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_rl.planner.candidate import Candidate, Job
from parallel.formats import SCHEMES, blocks_in
from parallel.layout import Coordinates, Layout
from parallel.layout_hints import one_of_each_layer
from parallel.megatron_shards import megatron_shards, stage_layers
from parallel.model_geometry import ModelGeometry, Shard
from parallel.reshard import kind_of
from parallel.sglang_shards import sglang_shards

_SCALE = 4
_EXPERT = ".local_experts."
_EMBEDDING, _OUTPUT, _FINAL_NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"


class Held(NamedTuple):
    """Bytes on one trainer rank."""

    weights: int = 0
    """Parameters, and FP32 buffers of the router."""
    blocks: int = 0
    """E4M3 data and scales."""
    operands: int = 0
    """What the back end keeps of the blocks beside them."""
    gradients: int = 0
    masters: int = 0
    """FP32 copies of parameters that are not FP32 themselves."""
    moments: int = 0

    def times(self, count: int) -> Held:
        return Held(*(count * size for size in self))

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def model(self) -> int:
        """What a forward pass needs."""
        return self.weights + self.blocks + self.operands


def trainer_held(job: Job, candidate: Candidate, stage: int) -> Held:
    """What a trainer rank of pipeline stage `stage` holds of the actor; ranks of one stage hold equally much."""
    return _trainer_held(job, candidate.train, stage)


@lru_cache(maxsize=4096)
def _trainer_held(job: Job, layout: Layout, stage: int) -> Held:
    found = [_shard_held(job, layout, shard).times(count) for shard, count in rank_shards(job.model, layout, stage)]
    return Held(*(sum(parts) for parts in zip(*found, strict=True)))


def reference_held(job: Job, candidate: Candidate, stage: int) -> int:
    """Bytes of the frozen reference, which has no gradients; 0 where the run has none."""
    return trainer_held(job, candidate, stage).model if job.reference else 0


def rank_shards(model: ModelGeometry, layout: Layout, stage: int) -> Iterator[tuple[Shard, int]]:
    """(parameter, how often) of a rank of pipeline stage `stage`. Raises GeometryError as `megatron_shards` does."""
    counts = layer_counts(model, layout, stage)
    first, last = stage == 0, stage == layout.pp - 1
    for shard, alike in _one_of_each(model, layout.tp, layout.ep, layout.etp):
        if shard.name == _EMBEDDING:
            yield shard, first + (last and not first and model.tied)  # the last stage keeps its own copy of a tied embedding
        elif shard.name in (_OUTPUT, _FINAL_NORM):
            yield shard, int(last)
        else:
            yield shard, counts[int(shard.name.split(".")[2])] * alike


@lru_cache(maxsize=256)
def _one_of_each(model: ModelGeometry, tp: int, ep: int, etp: int) -> tuple[tuple[Shard, int], ...]:
    """Parameters of one layer of each kind and of what surrounds them, with one expert for all of a rank."""
    layout = Layout(tp=tp, ep=ep, etp=etp, dp=math.lcm(tp, ep * etp) // tp)
    per_rank = model.experts.count // ep if model.experts else 1
    shards = megatron_shards(one_of_each_layer(model), layout, Coordinates())
    kept = (shard for shard in shards if _EXPERT not in shard.name or f"{_EXPERT}0." in shard.name)
    return tuple((shard, per_rank if _EXPERT in shard.name else 1) for shard in kept)


def layer_counts(model: ModelGeometry, layout: Layout, stage: int) -> list[int]:
    """How many layers of a stage are like each layer of `one_of_each_layer`."""
    plain, sparse = layer_kinds(model, layout.pp, layout.vpp, stage)
    if model.experts is None:
        return [plain]
    return [plain, sparse] if model.experts.dense_layers else [sparse]


@lru_cache(maxsize=1024)
def layer_kinds(model: ModelGeometry, pp: int, vpp: int, stage: int) -> tuple[int, int]:
    """(layers with one MLP, layers with experts) of a stage."""
    layers = stage_layers(model.layers, Layout(pp=pp, vpp=vpp), stage)
    sparse = sum(map(model.has_experts, layers))
    return len(layers) - sparse, sparse


def _shard_held(job: Job, layout: Layout, shard: Shard) -> Held:
    size = shard.rows * shard.cols
    if shard.role == "router_bias":  # a buffer, and Megatron's FP32 count of tokens per expert beside it
        return Held(weights=8 * size)
    replicas = 1
    if job.sharded_optimizer:
        replicas = layout.edp if _EXPERT in shard.name else layout.dp * layout.cp
    is_fp8 = job.contract.train_fp8 and kind_of(shard.role, job.contract.fp8_roles()) == "fp8"
    own_master = is_fp8 or job.high_bytes == 4
    return Held(
        weights=size * (4 if own_master else 2),
        blocks=_quantised(shard, "fp8") if is_fp8 else 0,
        operands=operand_bytes(job.config.precision.backend, shard.rows, shard.cols) if is_fp8 else 0,
        gradients=4 * size,
        masters=0 if own_master else -(-4 * size // replicas),
        moments=-(-8 * size // replicas),
    )


def operand_bytes(backend: str, rows: int, cols: int) -> int:
    """What `fp8.backends` keeps of a weight beside its blocks: dequantised values, or the bytes a second time, transposed, with scales."""
    if backend == "emulated":
        return 4 * rows * cols
    n, k = blocks_in(rows), blocks_in(cols)
    if backend == "deep_gemm":
        return rows * cols + _SCALE * n * k
    return rows * cols + _SCALE * (n * _to_four(k) + k * _to_four(n))  # Transformer Engine pads both sides' scales


def _to_four(length: int) -> int:
    return -(-length // 4) * 4


def quantised_for_sync(job: Job, candidate: Candidate, stage: int) -> int:
    """Bytes that a sync makes beside the weights where the engine is quantised and the trainer is not; 0 elsewhere."""
    if job.contract.train_fp8:
        return 0
    kinds = job.contract.fp8_roles(), job.contract.int8_roles()
    shards = rank_shards(job.model, candidate.train, stage)
    return sum(count * _quantised(shard, kind) for shard, count in shards if (kind := kind_of(shard.role, *kinds)) in SCHEMES)


def _quantised(shard: Shard, kind: str) -> int:
    """Bytes of data and scales."""
    return shard.rows * shard.cols + _SCALE * math.prod(shard.scale_shape_of(kind))


def engine_weights(job: Job, candidate: Candidate) -> int:
    """Bytes of an engine rank's parameters and scales, vocabulary padding included."""
    return _engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)


@lru_cache(maxsize=256)
def _engine_weights(job: Job, tp: int, ep: int) -> int:
    total = 0
    counts = layer_counts(job.model, Layout(), 0)
    for shard in sglang_shards(one_of_each_layer(job.model), tp, 0, ep):
        kind = kind_of(shard.role, job.contract.fp8_roles(), job.contract.int8_roles())
        parts = shard.name.split(".")
        count = counts[int(parts[2])] if parts[1] == "layers" else 1
        itemsize = 4 if kind == "fp32" else job.high_bytes
        total += count * (_quantised(shard, kind) if kind in SCHEMES else itemsize * shard.rows * shard.cols)
    return total


def kv_bytes_per_token(job: Job, tp: int) -> int:
    """Of an engine rank: keys and values of all layers, in the high dtype; MLA keeps one latent for all heads, on every rank."""
    model = job.model
    if model.latent is not None:
        width = model.latent.kv_rank + model.latent.rope_dim
    else:
        width = 2 * max(1, model.kv_heads // tp) * model.head_dim
    return model.layers * width * job.high_bytes


def kv_cache(job: Job, candidate: Candidate) -> int:
    """Bytes of `rollout.max_total_tokens` on an engine rank, and SGLang's int32 table of where each request's tokens lie."""
    rollout = job.config.rollout
    table = 4 * rollout.max_running_requests * job.positions
    return rollout.max_total_tokens * kv_bytes_per_token(job, candidate.rollout_tp) + table
