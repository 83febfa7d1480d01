"""Models of small random widths as numpy arrays, and shards cut from them element by element: the expected results of a plan's
transfers."""

import math
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from parallel.attention import GatedDeltaNet, LatentAttention
from parallel.formats import BF16, BLOCK, FP8, FP32, INT8
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import FP32_ROLES
from support.families import ARCHITECTURES, QUANTIZED

ROLES = frozenset({"attention_qkv", "attention_output", "mlp_in", "mlp_out"})


def as_fp8(role):
    return FP8 if role in ROLES else as_bf16(role)


def as_bf16(role):
    return FP32 if role in FP32_ROLES else BF16


def as_int8(role):
    return INT8 if role in ROLES else as_bf16(role)


Arrays = dict[str, np.ndarray]
"""Name -> two-dimensional array of raw values: bytes of FP8 weights (uint8), scales (float32), else uint16, or uint32 where FP32."""


@dataclass(frozen=True)
class Case:
    """A model, the trainer's layout, and the engines' layout."""

    model: ModelGeometry
    train: Layout
    rollout_tp: int
    rollout_ep: int = 1
    engines: int = 1


def _divisors(length, limit=8):
    return [size for size in range(1, min(length, limit) + 1) if length % size == 0]


@st.composite
def cases(draw, *families):
    """Draw models of the families, by default of all, with small random widths (multiples of 128 where FP8 blocks are), and layouts that
    divide them."""
    model = ModelGeometry.from_hf_config(ARCHITECTURES[draw(st.sampled_from(families or QUANTIZED))])
    experts, attention = model.experts, model.attention[-1]
    latent = isinstance(attention, LatentAttention)
    delta_nets = [kind for kind in dict.fromkeys(model.attention) if isinstance(kind, GatedDeltaNet)]
    head_dim = BLOCK if latent else draw(st.sampled_from([BLOCK] * 3 + [64]))
    kv_heads, per_kv = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2)]))
    kv_heads *= BLOCK // head_dim  # heads of 64 in pairs: shards of whole blocks, though groups are none
    heads = kv_heads * per_kv
    smallest = kv_heads * head_dim // BLOCK
    through_groups = [tp for tp in (2, 4) if head_dim == BLOCK and tp % kv_heads == 0 and heads % tp == (heads + 2 * kv_heads) % tp == 0]
    train_tp = draw(st.sampled_from([*(tp for tp in (1, 2, 4) if smallest % tp == 0), *through_groups]))
    rollout_tps = [tp for tp in (1, 2, 3, 4, 8) if heads % tp == 0 and (smallest % tp == 0 or (head_dim == BLOCK and tp % kv_heads == 0))]
    rollout_tp = draw(st.sampled_from(rollout_tps))
    pp, dp, cp = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    layers = pp * vpp * draw(st.integers(1, 2 if pp == 1 else 1))
    last_stage_layers = draw(st.sampled_from([0, 2 * vpp])) if pp > 1 else 0
    layers += vpp * (last_stage_layers > 0)
    ep, etp, rollout_ep = 1, 1, 1
    if experts:
        count = draw(st.sampled_from([2, 4, 6]))
        etp = draw(st.sampled_from(_divisors(train_tp * cp * dp, 2)))
        ep = draw(st.sampled_from([size for size in _divisors(count) if train_tp * cp * dp % (size * etp) == 0]))
        rollout_ep = draw(st.sampled_from([size for size in _divisors(count) if rollout_tp % size == 0]))
        experts = replace(
            experts,
            count=count,
            ffn=BLOCK * math.lcm(etp, rollout_tp // rollout_ep),
            shared_ffn=BLOCK * math.lcm(train_tp, rollout_tp) if experts.shared_ffn else 0,
            dense_layers=frozenset(draw(st.sets(st.integers(0, layers - 1))) if experts.dense_in_engine else ()),
        )
    if latent:
        attention = replace(attention, heads=heads * 2, q_rank=draw(st.sampled_from([0, 128, 256])), nope_dim=64, v_dim=64)
    else:
        attention = replace(attention, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    kinds = [attention]
    for kind in delta_nets:  # each rank has whole blocks of q, k, v and z
        dim, shared = draw(st.sampled_from([64, BLOCK])), draw(st.sampled_from([1, 2, 4]))
        k_heads = math.lcm(train_tp, rollout_tp) * (BLOCK // dim)
        kinds.append(replace(kind, k_heads=k_heads, v_heads=k_heads * shared, k_dim=dim, v_dim=dim))
    numbers = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=layers, max_size=layers))
    model = replace(
        model,
        attention=tuple(kinds[number] for number in numbers),
        hidden=BLOCK * draw(st.integers(1, 3)),
        ffn=BLOCK * math.lcm(train_tp, rollout_tp) * draw(st.integers(1, 2)),
        vocab=draw(st.integers(2, 300)),
        tied=draw(st.booleans()),
        experts=experts,
    )
    train = Layout(tp=train_tp, pp=pp, vpp=vpp, last_stage_layers=last_stage_layers, ep=ep, etp=etp if experts else 0, dp=dp, cp=cp)
    return Case(model, train, rollout_tp, rollout_ep, draw(st.integers(1, 2)))


def checkpoint(model, format=FP8):
    """Return random arrays of every tensor of the checkpoint: quantized weights as bytes and scales on the checkpoint's own grid, all
    different, the rest as raw values."""
    random = np.random.default_rng(0)
    arrays = {}
    for tensor in model.tensors().values():
        kind = np.uint8 if tensor.role in ROLES else np.uint32 if tensor.role in FP32_ROLES else np.uint16
        arrays[tensor.name] = random.integers(0, 256 if kind == np.uint8 else 2**16, (tensor.rows, tensor.cols), dtype=kind)
        if tensor.role in ROLES:
            grid = format.scale_grid(tensor.rows, tensor.cols)
            arrays[format.scale_name(tensor.name)] = 1 + random.permutation(math.prod(grid)).reshape(grid).astype(np.float32)
    return arrays


def cut(shards, source, format=FP8):
    """Return the arrays of some shards. A scale is first spread over the elements of its block and cut with them, so that a shard whose
    blocks do not coincide with the checkpoint's is noticed."""
    arrays = {}
    for shard in shards:
        arrays[shard.name] = lay(shard, source)
        if shard.role in ROLES:
            rows, cols = format.block[0], format.block[1] or max(shard.cols, *(region.tensor.cols for region in shard.regions))
            spread = {r.tensor.name: source[format.scale_name(r.tensor.name)].repeat(rows, 0).repeat(cols, 1) for r in shard.regions}
            elements = lay(shard, spread)
            scales = elements[::rows, ::cols]
            assert np.array_equal(scales.repeat(rows, 0).repeat(cols, 1)[: shard.rows, : shard.cols], elements), (
                f"{shard.name} cuts a block"
            )
            arrays[format.scale_name(shard.name)] = scales
    return arrays


def lay(shard, source):
    """Return the array of a shard, cut from those of the checkpoint; padding is zero."""
    result = np.zeros((shard.rows, shard.cols), source[shard.regions[0].tensor.name].dtype)
    for region in shard.regions:
        rect = region.tensor_rect
        values = source[region.tensor.name][rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
        result[region.shard_row : region.shard_row + rect.rows, region.shard_col : region.shard_col + rect.cols] = values
    return result


def cut_all(shards, source, format=FP8):
    return {rank: cut(held, source, format) for rank, held in shards.items()}


def assert_same(got, expected):
    for rank, arrays in expected.items():
        assert got[rank].keys() == arrays.keys()
        for name, array in arrays.items():
            assert got[rank][name].dtype == array.dtype
            assert np.array_equal(got[rank][name], array), f"rank {rank}: {name} differs"
