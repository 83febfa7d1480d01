"""Gated delta nets, gated attention and gated shared experts of Qwen3-Next and Qwen3.5, with the trainer's operators. They replace kernels
of SGLang whose sums depend on the batch and on where a prompt is cut. On a CPU all of them do. On a GPU the delta rule and its norm do, if
`SHARED_VARIABLE` is set; then no CUDA graph may capture prompts, because a pass copies their lengths to the GPU.

SGLang's pool of states holds, by layer and request, the last inputs of the convolution `[channels, taps - 1]` in `precision.high` and the
recurrent state in float32. The operator updates both in the pool. It stores a state as `[v heads, k_dim, v_dim]`; SGLang, which would store
`[v heads, v_dim, k_dim]`, only copies and clears whole states.
"""

from typing import Any

import torch

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
from megatron_rl.kernels.gated_delta.reference import advance
from megatron_rl.kernels.gates import reference as gates

SHARED_VARIABLE = "MEGATRON_RL_DELTA"  # environment variable of the processes of an engine on a GPU that shares the trainer's delta rule
_SILU = ("silu", "swish")
_STATE_DTYPE = torch.float32

Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def split_contiguous(qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> Split:
    """Replace `fused_qkvzba_split_reshape_cat_contiguous` of Qwen3.5: rows of `qkvz` are [q | k | v | z], those of `ba` [b | a]. Return the
    convolution's input [q | k | v], z `[T, v heads, v_dim]`, b and a `[T, v heads]`."""
    mixed, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], -1)
    b, a = ba.split([v_heads, v_heads], -1)
    return mixed, z.unflatten(-1, (v_heads, v_dim)), b, a


def split_grouped(qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> Split:
    """Replace `fused_qkvzba_split_reshape_cat` of Qwen3-Next, whose rows are grouped by key head: [q | k | its v heads | their z], and
    [their b | their a]. Return what `split_contiguous` returns."""
    ratio = v_heads // k_heads
    q, k, v, z = qkvz.unflatten(-1, (k_heads, -1)).split([k_dim, k_dim, ratio * v_dim, ratio * v_dim], -1)
    b, a = ba.unflatten(-1, (k_heads, -1)).split([ratio, ratio], -1)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
    return mixed, z.reshape(len(z), v_heads, v_dim), b.flatten(1), a.flatten(1)


def gate_norm(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """Replace `forward` of Qwen3.5's `RMSNorm` and of Qwen3-Next's `FusedRMSNormGated`: x and z `[T * v heads, v_dim]`."""
    if z is None or self.activation not in _SILU or getattr(self, "group_size", None) or not getattr(self, "norm_before_gate", True):
        raise NotImplementedError(f"a gated norm other than rms_norm(x) * silu(z) is not supported ({self.activation})")
    return gates.gate_norm(x, z.reshape(x.shape), self.weight, self.eps)


def apply_zero_centered_norm(
    self: Any, x: torch.Tensor, residual: torch.Tensor | None = None, post_residual_addition: torch.Tensor | None = None
) -> Any:
    """Replace `GemmaRMSNorm.forward_native`, whose weight is 1 + `weight`, added in FP32. The derived `gemma_weight` is rounded."""
    if post_residual_addition is not None:
        raise NotImplementedError("a third part of the residual stream is not supported on the CPU tier")
    summed = x if residual is None else x + residual
    normed = batch_invariant.rms_norm(summed, 1.0 + self.weight.float(), self.variance_epsilon)
    return normed if residual is None else (normed, summed)


def attend_with_gate(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    """Replace `self_attention` of both families' attention layers. SGLang rounds the gate's sigmoid before it multiplies."""
    q, k, v, gate = self.forward_prepare_native(positions, hidden_states)
    attended = self.attn(q, k, v, forward_batch)
    if gate is not None:
        attended = gates.gate(attended, gate.reshape(attended.shape))
    return self.o_proj(attended)[0]


def add_gated_shared_expert(x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, total: torch.Tensor) -> None:
    """Replace `fused_gate_sigmoid_mul_add`: add shared * sigmoid(x . weight) to `total` `[T, H]` in place. weight: `[H]`."""
    total += gates.gate(shared, batch_invariant.invariant_matmul(x, weight[None]))


def check_state_dtypes(windows: torch.Tensor, states: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if a pool rounds what the operator hands it: windows must have the dtype of activations, states float32."""
    if (windows.dtype, states.dtype) != (dtype, _STATE_DTYPE):
        raise ValueError(
            f"the engine keeps convolution windows in {windows.dtype} and states in {states.dtype}, not in {dtype} and {_STATE_DTYPE}"
        )


def extend(self: Any, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
    """Replace `GDNAttnBackend.forward_extend`: parts of prompts, one after the other. Return `[1, T, v heads, v_dim]`. A part without a
    cached prefix starts from zeros, every other part from what its slot holds."""
    if forward_batch.forward_mode.is_target_verify() or self.forward_metadata.has_mamba_track_mask or self.mis_metadata is not None:
        raise NotImplementedError(
            "states inside of a prompt's part, for --mamba-radix-cache-strategy extra_buffer or drafts, are not supported"
        )
    fresh = forward_batch.extend_prefix_lens == 0
    return _advance(self, layer, mixed_qkv, a, b, list(forward_batch.extend_seq_lens_cpu), fresh)


def decode(self: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: torch.Tensor, b: torch.Tensor, **_: Any) -> Any:
    """Replace `GDNAttnBackend.forward_decode`: one token of every request. Qwen3.5 on a GPU passes its projections (qkvz, ba) as
    `mixed_qkv`, which SGLang splits in the kernel of its convolution, and takes z beside the result."""
    if forward_batch.mamba_track_mask is not None:
        raise NotImplementedError("--mamba-radix-cache-strategy extra_buffer is not supported")
    if isinstance(mixed_qkv, torch.Tensor):
        return _advance(self, layer, mixed_qkv, a, b, [1] * len(mixed_qkv), None)
    qkvz, ba = mixed_qkv
    mixed, z, b, a = split_contiguous(qkvz, ba, *_get_heads(layer))
    return _advance(self, layer, mixed, a, b, [1] * len(mixed), None), z


def _get_heads(layer: Any) -> DeltaHeads:
    return DeltaHeads(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)


def _advance(
    backend: Any, layer: Any, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: list[int], fresh: torch.Tensor | None
) -> torch.Tensor:
    pool, heads = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id), _get_heads(layer)
    windows, states = pool.conv[0], pool.temporal
    check_state_dtypes(windows, states, mixed.dtype)
    slots = backend.forward_metadata.mamba_cache_indices  # -1 pads a CUDA graph's batch: ~0, and slot 0 is nobody's
    if fresh is not None:
        slots = torch.where(fresh, ~slots, slots)
    weights = DeltaWeights(layer.conv_weights, layer.A_log, layer.dt_bias, heads)
    states = states.view(len(states), heads.v, heads.k_dim, heads.v_dim)
    return advance(weights, mixed, a, b, lengths, slots, windows, states)[None]
