"""Bytes that a GPU holds for the whole run. Exact, because they are counted from the shards that trainer and engine use.

Bytes that the trainer holds per element of a parameter:

                        FP8 layer in fp8_unified         other layers, BF16           other layers, FP32
    weight              -                                2                            4  (is its own master)
    blocks              1 + 4/16384                      -                            -
    operand             see `count_operand_bytes`        -                            -
    gradient            4                                4                            4
    master              4 / replicas                     4 / replicas                 -
    Adam's moments      8 / replicas                     8 / replicas                 8 / replicas

Masters and moments are sharded over the replicas; a weight that is its own master is not. With LoRA, only adapters have gradients, masters
and moments. Layers of one kind are equal, so one layer of each kind is counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_rl.cost.workload import Candidate, Workload
from parallel.adapters import is_adapter
from parallel.formats import FP32, TensorFormat
from parallel.layout import Coordinates, Layout, list_stage_layers
from parallel.layout_hints import keep_one_layer_per_kind
from parallel.megatron_shards import build_megatron_shards, padded_vocabulary
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import MEGATRON_PREFIX
from parallel.sglang_shards import build_sglang_shards
from parallel.shards import Shard

EXPERT = ".local_experts."
_EMBEDDING, _OUTPUT, _FINAL_NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"


_QUANTIZER_BYTES = {"fp8": 9, "int8": 16}
"""Bytes per value at the peak of quantizing a weight, by format: FP32 copies, and for FP8 the result."""


class RankMemory(NamedTuple):
    """Bytes on one trainer rank."""

    weights: int = 0
    """Unquantized parameters, and FP32 buffers of the router."""
    blocks: int = 0
    """Quantized data and scales."""
    operands: int = 0
    """Copies that the backend keeps in addition to the blocks."""
    transposed: int = 0
    """Copies that a GPU's backend makes at the first backward pass."""
    gradients: int = 0
    masters: int = 0
    """FP32 copies of parameters that are not in FP32."""
    moments: int = 0

    def times(self, count: int) -> RankMemory:
        return RankMemory(*(count * size for size in self))

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def model(self) -> int:
        """Bytes that a forward pass needs."""
        return self.weights + self.blocks + self.operands


@lru_cache(maxsize=1 << 14)
def count_trainer_memory(job: Workload, layout: Layout, stage: int) -> RankMemory:
    """Return the actor's bytes on a trainer rank of pipeline stage `stage`. All ranks of a stage hold the same amount."""
    counts = _count_parts(job.model, layout, stage)
    sizes = _count_part_memory(job, layout.tp, layout.ep, layout.etp, layout.dp * layout.cp, layout.edp)
    parts = [size.times(count) for part, size in sizes.items() if (count := counts[part])]
    if job.trained_mtp_layers and stage == layout.pp - 1 and layout.pp > 1:  # multi-token prediction layers need the embedding
        parts.append(RankMemory(weights=padded_vocabulary(job.model.vocab, layout.tp) // layout.tp * job.model.hidden * job.high_bytes))
    return RankMemory(*map(sum, zip(*parts, strict=True)))


def count_rank_shards(model: ModelGeometry, layout: Layout, stage: int) -> Iterator[tuple[Shard, int]]:
    """Yield (parameter, count on a rank of pipeline stage `stage`). Raise GeometryError as `build_megatron_shards` does."""
    counts = _count_parts(model, layout, stage)
    for shard, copies in _representative_shards(model, layout.tp, layout.ep, layout.etp):
        yield shard, copies * counts[_part_of(shard)]


def _count_parts(model: ModelGeometry, layout: Layout, stage: int) -> dict[str, int]:
    """Return how often a stage holds each part of a model: the embedding, a layer of each kind, and what follows the layers."""
    first, last = stage == 0, stage == layout.pp - 1
    counts = {str(kind): count for kind, count in enumerate(count_layer_kinds(model, layout, stage))}
    counts[_EMBEDDING] = first + (last and not first and model.tied)  # the last stage keeps its own copy of a tied one
    return counts | dict.fromkeys((_OUTPUT, _FINAL_NORM, MEGATRON_PREFIX), int(last))


def _part_of(shard: Shard) -> str:
    if shard.name in (_EMBEDDING, _OUTPUT, _FINAL_NORM):
        return shard.name
    return MEGATRON_PREFIX if shard.name.startswith(MEGATRON_PREFIX) else shard.name.split(".")[2]


@lru_cache(maxsize=4096)
def _count_part_memory(job: Workload, tp: int, ep: int, etp: int, replicas: int, expert_replicas: int) -> dict[str, RankMemory]:
    """Return the bytes of each part on a rank that holds it."""
    sizes: dict[str, list[RankMemory]] = defaultdict(list)
    for shard, copies in _representative_shards(job.model, tp, ep, etp):
        size = _count_shard_memory(job, shard, expert_replicas if EXPERT in shard.name else replicas)
        sizes[_part_of(shard)].append(size.times(copies))
    return {part: RankMemory(*map(sum, zip(*each, strict=True))) for part, each in sizes.items()}


@lru_cache(maxsize=256)
def _representative_shards(model: ModelGeometry, tp: int, ep: int, etp: int) -> tuple[tuple[Shard, int], ...]:
    """Return (parameter, copies) for parameters outside layers and of one layer of each kind; one expert represents all of a rank."""
    layout = Layout(tp=tp, ep=ep, etp=etp, dp=math.lcm(tp, ep * etp) // tp)
    per_rank = model.experts.count // ep if model.experts else 1
    shards = build_megatron_shards(keep_one_layer_per_kind(model), layout, Coordinates())
    representatives = (shard for shard in shards if EXPERT not in shard.name or f"{EXPERT}0." in shard.name)
    return tuple((shard, per_rank if EXPERT in shard.name else 1) for shard in representatives)


def count_layer_kinds(model: ModelGeometry, layout: Layout, stage: int) -> tuple[int, ...]:
    """Return how many layers of a stage are of each of `model.layer_kinds`, which are the layers of `keep_one_layer_per_kind`."""
    return _count_kinds_by_stage(model, layout.pp, layout.vpp, layout.first_stage_layers, layout.last_stage_layers)[stage]


@lru_cache(maxsize=4096)
def _count_kinds_by_stage(model: ModelGeometry, pp: int, vpp: int, first: int, last: int) -> tuple[tuple[int, ...], ...]:
    layout, kinds = Layout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last), model.layer_kinds
    numbers = [kinds.index(model.layer_kind(layer)) for layer in range(model.layers)]
    found = (Counter(numbers[layer] for layer in list_stage_layers(model.layers, layout, stage)) for stage in range(pp))
    return tuple(tuple(counts[number] for number in range(len(kinds))) for counts in found)


def list_extreme_stages(job: Workload, layout: Layout) -> tuple[int, ...]:
    """Return pipeline stages of which one needs the most memory: the first stage with each mix of layers, and the last stage.

    Of the stages with the same layers, the first has the most micro-batches in flight, and only the last has more besides: the logits.
    """
    return _list_extreme_stages(job, layout.pp, layout.vpp, layout.first_stage_layers, layout.last_stage_layers)


@lru_cache(maxsize=4096)
def _list_extreme_stages(job: Workload, *sizes: int) -> tuple[int, ...]:
    by_model = [_count_kinds_by_stage(each.model, *sizes) for each in (job, job.teacher) if each is not None]
    first: dict[tuple[tuple[int, ...], ...], int] = {}
    for stage, mix in enumerate(zip(*by_model, strict=True)):
        first.setdefault(mix, stage)
    return tuple(sorted({*first.values(), sizes[0] - 1}))


def _count_shard_memory(job: Workload, shard: Shard, replicas: int) -> RankMemory:
    size = shard.rows * shard.cols
    if shard.role == "router_bias":  # a buffer, and Megatron's FP32 count of tokens per expert
        return RankMemory(weights=8 * size)
    format = job.contract.trainer_format_of(shard.role)
    held = RankMemory(
        weights=0 if format.quantized else format.count_bytes(shard.shape),
        blocks=format.count_bytes(shard.shape) if format.quantized else 0,
        **(_count_copies(job, shard, format) if format.quantized else {}),
    )
    if job.trains_adapters and not is_adapter(shard.name):
        return held
    return held._replace(
        gradients=4 * size,
        masters=0 if format == FP32 else -(-4 * size // replicas),
        moments=-(-8 * size // replicas),
    )


def _count_copies(job: Workload, shard: Shard, format: TensorFormat) -> dict[str, int]:
    """Return the bytes of a quantized weight's copies in `RankMemory`. A GPU's backend makes a transposed one for backward passes. Grouped
    products of experts use DeepGEMM, which needs contiguous blocks in forward passes, too."""
    backend = job.config.precision.backend
    grouped = backend != "emulated" and EXPERT in shard.name and not job.contract.sums_by_tree
    copy = count_operand_bytes("deep_gemm" if grouped else backend, format, shard.rows, shard.cols)
    return {"operands": copy} if backend == "emulated" else {"operands": copy if grouped else 0, "transposed": copy}


def count_operand_bytes(backend: str, format: TensorFormat, rows: int, cols: int) -> int:
    """Return the bytes that `kernels.linear` keeps in addition to a weight's blocks: FP32 values, or a transposed copy with scales."""
    if backend == "emulated":
        return 4 * rows * cols
    if backend == "deep_gemm":
        return format.count_bytes((rows, cols))
    n, k = format.scale_grid(rows, cols)
    padded_n, padded_k = -(-n // 4) * 4, -(-k // 4) * 4  # Transformer Engine pads both sides' scales
    return format.element_bytes * rows * cols + format.scale.element_bytes * (n * padded_k + k * padded_n)


def count_sync_memory(job: Workload, candidate: Candidate, stage: int) -> int:
    """Return the bytes that a sync takes: the buffer of its chunks, and if only the engine is quantized, the quantized weights. The largest
    one may need more while it is made, before the buffer exists."""
    buffer = job.config.sync.bucket_mb << 20
    if job.contract.trainer_format.quantized:
        return buffer
    shards = ((shard, job.contract.format_of(shard.role), count) for shard, count in count_rank_shards(job.model, candidate.train, stage))
    quantized = [(math.prod(shard.shape), format, format.count_bytes(shard.shape), count) for shard, format, count in shards if count]
    quantized = [each for each in quantized if each[1].quantized]
    total = sum(count * nbytes for *_, nbytes, count in quantized)
    return max([total + buffer, *(total - nbytes + size * _QUANTIZER_BYTES[format.name] for size, format, nbytes, _ in quantized)])


@lru_cache(maxsize=256)
def count_engine_weights(job: Workload, tp: int, ep: int) -> int:
    """Return the bytes of an engine rank's parameters and scales, including vocabulary padding."""
    total = 0
    counts = count_layer_kinds(job.model, Layout(), 0)
    for shard in build_sglang_shards(keep_one_layer_per_kind(job.model), tp, 0, ep):
        parts = shard.name.split(".")
        count = counts[int(parts[2])] if parts[1] == "layers" else 1
        total += count * job.contract.format_of(shard.role).count_bytes(shard.shape)
    return total


@lru_cache(maxsize=256)
def count_kv_bytes_per_token(job: Workload, tp: int) -> int:
    """Return the bytes per token of what all layers cache on an engine rank."""
    return sum(kind.count_cache_bytes(tp, job.contract.count_kv_bytes) for kind in job.model.attention)


@lru_cache(maxsize=256)
def count_state_bytes_per_request(job: Workload, tp: int) -> int:
    """Return the bytes of one slot of an engine rank's pool of states: those of all layers, of one request."""
    return sum(kind.count_state_bytes(tp, job.high_bytes) for kind in job.model.attention)


def count_kv_cache(job: Workload, candidate: Candidate) -> int:
    """Return the bytes on an engine rank of `rollout.max_total_tokens` tokens, of SGLang's int32 table of token slots for each request, and
    of the pool of states, which has one slot more for padded batches."""
    rollout, tp = job.config.rollout, candidate.rollout_tp
    table = 4 * int(job.hf_config.get("max_position_embeddings", 0)) * rollout.max_running_requests
    states = (rollout.state_slots + 1) * count_state_bytes_per_request(job, tp)
    return rollout.max_total_tokens * count_kv_bytes_per_token(job, tp) + table + states
