"""Which kernels the trainer's live modules compute with (`precision.graph.kernels`). What this file does not know is named by its class, so
it differs from every kernel of an engine."""

from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.kernels import batch_invariant, plain
from megatron_rl.kernels.attention import flash3
from megatron_rl.kernels.attention.reference import flash_attention, sdpa_per_sequence
from megatron_rl.kernels.experts import expert_sum
from megatron_rl.kernels.gated_delta import reference as gated_delta
from megatron_rl.kernels.gates import reference as gates
from megatron_rl.kernels.heads import reference as heads
from megatron_rl.kernels.linear import reference as linear
from megatron_rl.kernels.norm import heads as all_heads
from megatron_rl.kernels.norm import reference as norm
from megatron_rl.kernels.rope import reference as rope
from megatron_rl.kernels.split_attention import ORDER
from megatron_rl.kernels.split_attention import reference as split_attention
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.kernels.swiglu import clamped
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.kernels.vocabulary import reference as vocabulary
from megatron_rl.mcore.layers.attention.gated_delta_net import GatedNorm
from megatron_rl.mcore.layers.attention.self_attention import PackedSelfAttention
from megatron_rl.mcore.layers.linear.norms import AllHeadsNorm, RMSNorm
from megatron_rl.mcore.layers.moe.experts import TreeDispatcher
from megatron_rl.mcore.layers.spec import ClampedSwiGLU, SwiGLU
from megatron_rl.precision import int8
from megatron_rl.precision.graph.kernels import (
    BLOCKS_OF_K,
    LOOKUP,
    ROUNDED_ROTATION,
    ROUNDED_SILU,
    SUMS_BY_EXPERT,
    VOCABULARY_TREE,
    Kernel,
    find_package,
    identify,
)
from megatron_rl.precision.graph.reader import TABLE_ROWS, digest_table

EMBEDDING = identify(F.embedding, LOOKUP)
HEADS = identify(batch_invariant.multiply_heads)  # products of absorbed latents, head by head


def identify_norm(name: str, module: Any, on_gpu: bool) -> Kernel:
    """Return what computes a norm of a layer, by its name in the graph."""
    if isinstance(module, GatedNorm):
        return identify(gates.gate_norm, on_gpu=on_gpu)
    if isinstance(module, AllHeadsNorm):
        return identify(all_heads.normalize)
    if type(module).forward is not RMSNorm.forward:
        return identify(type(module).forward)
    if not on_gpu:
        return identify(batch_invariant.rms_norm)
    return identify(heads.normalize_heads if name in ("attention.q_norm", "attention.k_norm") else norm.normalize, on_gpu=True)


def identify_linear(module: Any, by_tree: bool, on_gpu: bool) -> Kernel:
    """Return what computes a product with the weight of a module."""
    if getattr(module, "blocks", None) is None:
        if by_tree:
            return identify(tree.multiply, on_gpu=on_gpu)
        if plain.is_shared():
            return identify(plain.multiply, plain.ORDER)
        return identify(F.linear if on_gpu else batch_invariant.invariant_matmul)
    if not module.quantizes_input:
        return identify(batch_invariant.invariant_matmul, on_gpu=on_gpu)
    backend = type(module.backend)
    if backend is linear.EmulatedInt8:
        return identify(int8.int8_matmul)
    if backend is linear.EmulatedBackend:
        return identify(linear.fprop_by_tree if by_tree else linear.fprop)
    if by_tree:
        return identify(tree.multiply_blocks, on_gpu=True)
    package = backend.__module__.rpartition(".")[2]
    return Kernel(f"{package}.fp8_gemm_nt", find_package(package), BLOCKS_OF_K if module.format.scale_format == "pow2" else "")


def identify_scores(on_gpu: bool) -> Kernel:
    return identify(vocabulary.summarize, VOCABULARY_TREE, on_gpu)


def identify_rest(layer: Any, model: Any, on_gpu: bool) -> dict[str, Kernel]:
    """Return what computes the operators of a layer that are no modules, by kind or name."""
    attention, mlp = layer.self_attention, layer.mlp
    kernels = {"gate": identify(gates.gate, on_gpu=on_gpu), "swiglu": _identify_activation(mlp, on_gpu)}
    if hasattr(mlp, "router"):
        kernels["mlp.experts.swiglu"] = _identify_activation(mlp.experts.local_experts[0], on_gpu)
        by_tree = isinstance(mlp.token_dispatcher, TreeDispatcher)
        function = expert_sum.sum_experts if by_tree else type(mlp.token_dispatcher).combine_postprocess
        kernels["weighted_sum"] = identify(function, "" if by_tree else SUMS_BY_EXPERT)
        kernels["swiglu"] = _identify_activation(mlp.shared_experts, on_gpu) if mlp.shared_experts is not None else kernels["swiglu"]
    if not hasattr(attention, "core_attention"):
        return kernels | dict.fromkeys(("causal_conv", "gated_delta"), identify(gated_delta.advance, on_gpu=on_gpu))
    table = _digest_rotary_table(attention, model)
    rotation: Any = heads.turn_heads if isinstance(attention, PackedSelfAttention) else rope.rotate
    rotary = identify(rotation, table, True) if on_gpu else identify(rope.RoundedRotation.turn, f"{ROUNDED_ROTATION}, {table}")
    hidden = model.config.params_dtype
    core = batch_invariant.attention if not on_gpu else sdpa_per_sequence if hidden is torch.float32 else flash_attention
    if on_gpu and model.config.shared_attention == "triton":
        return kernels | {"rope": rotary, "attention": identify(split_attention.attend, ORDER, True)}
    if on_gpu and model.config.shared_attention:
        return kernels | {"rope": rotary, "attention": Kernel(flash3.KERNEL, find_package("sgl_kernel"), flash3.ORDER)}
    return kernels | {"rope": rotary, "attention": identify(core)}


def _identify_activation(mlp: Any, on_gpu: bool) -> Kernel:
    function = getattr(mlp, "activation_func", None)
    if isinstance(function, SwiGLU):
        return identify(swiglu.multiply, on_gpu=on_gpu)
    if isinstance(function, ClampedSwiGLU):
        return identify(clamped.clamped_swiglu)
    return identify(function or F.silu, ROUNDED_SILU if function in (None, F.silu) else "")


@torch.no_grad()
def _digest_rotary_table(attention: Any, model: Any) -> str:
    """Return the name of the live rotary table, as `PackedSelfAttention` and `LatentAttention` make it: of all positions on every rank of
    context parallelism, as packed rows have it."""
    config, latent = attention.config, hasattr(attention, "kv_layernorm")
    angles = (attention if latent else model).rotary_pos_emb(TABLE_ROWS, packed_seq=True)
    if latent:
        angles, scale = angles if isinstance(angles, tuple) else (angles, 1.0)
    else:
        scale = attention._yarn_concentration_factor * config.yarn_attn_factor
    angles = angles[:, 0, 0]
    once = angles[:, ::2] if config.rotary_interleaved and not latent else angles[:, : angles.shape[1] // 2]
    if once.is_cuda:
        rotation: Any = rope.Rotation.from_angles(once, torch.arange(len(once), device=once.device), False, scale)
        return digest_table(rotation.cos, rotation.sin, torch.float32)
    rotation = rope.RoundedRotation.from_angles(once, torch.arange(len(once)), False, scale, config.params_dtype)
    return digest_table(rotation.cos.squeeze(1), rotation.sin.squeeze(1), config.params_dtype)
