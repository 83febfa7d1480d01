"""SGLang's operators on rows on an NVIDIA GPU, computed by the trainer's kernels, whose sums have one order for any number of rows: norms,
q/k norms, rotary positions, SwiGLU, and log-probs. A call outside of what the trainer computes goes to SGLang. On tensors of a CPU, the
references of the kernels run."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.kernels.heads import reference as heads
from megatron_rl.kernels.norm import reference as norm
from megatron_rl.kernels.rope.reference import Rotation
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.kernels.vocabulary import reference as vocabulary
from rollout_sglang.hooks import quantized_rows


def is_trainers_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None, post_residual_addition: torch.Tensor | None) -> bool:
    """Return whether the trainer has the formula of a call of SGLang's `RMSNorm`."""
    other_formula = norm.fp32_residual or norm.cast_x_before_out_mul or norm.override_orig_dtype or norm.variance_size_override
    return not other_formula and post_residual_addition is None and (residual is None or residual.dtype == x.dtype)


def apply_rms_norm(
    original: Callable[..., Any],
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """Wrap `RMSNorm.forward_cuda`: return the norm `[..., h]` of x, or (norm of the rounded sum, sum)."""
    if not is_trainers_norm(self, x, residual, post_residual_addition):
        return original(self, x, residual, post_residual_addition, quant_linear)
    given = x, residual, self.weight, self.variance_epsilon
    if quantized_rows.quantizes(self, x):
        total, normed = quantized_rows.normalize(*given)
    else:
        total, _, normed = norm.normalize(*given)
    return normed if residual is None else (normed, total)


def apply_head_norms(
    original: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Any,
    k_norm: Any,
    head_dim: int,
    alt_stream: Any = None,
    allow_inplace: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrap `apply_qk_norm`: return the norms of the heads of q `[t, heads * d]` and k `[t, groups * d]`, which may be parts of wider
    rows."""
    if q.dim() != 2 or head_dim & (head_dim - 1) or q_norm.variance_epsilon != k_norm.variance_epsilon:
        return original(q, k, q_norm, k_norm, head_dim, alt_stream, allow_inplace)
    query, key = (x.unflatten(1, (-1, head_dim)) for x in (q, k))
    query, key = heads.normalize_heads(query, key, (q_norm.weight, k_norm.weight), q_norm.variance_epsilon)
    return query.flatten(1), key.flatten(1)


def rotate(
    original: Callable[..., Any],
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrap `RotaryEmbedding.forward_cuda`: return q `[t, heads * d]` and k `[t, groups * d]` rotated by FP32 tables."""
    plain = offsets is None and fused_set_kv_buffer_arg is None and positions.dim() == 1 and key is not None
    if not plain or query.dim() != 2 or self.cos_sin_cache.dtype != torch.float32:
        return original(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
    rotation = Rotation(*_read_tables(self), positions, not self.is_neox_style)
    q, k = (x.unflatten(1, (-1, self.head_size)) for x in (query, key))
    if heads.can_rotate(rotation, self.head_size):
        q, k = heads.turn_heads(q, k, rotation)
    else:
        q, k = rotation.turn(q, 1.0), rotation.turn(k, 1.0)
    return q.flatten(1), k.flatten(1)


def prepare_heads(original: Callable[..., Any], self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
    """Wrap `Qwen3Attention.forward_prepare_native`: return q, k, v, of which one kernel normalizes and rotates q and k."""
    if not _is_plain(self, positions):
        return original(self, positions, hidden_states)
    return _prepare(self, self.qkv_proj(hidden_states)[0], positions)


def prepare_expert_heads(self: Any, qkv: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
    """Replace `Qwen3MoeAttention.apply_qk_norm_rope`, see `prepare_heads`. SGLang would rotate by a kernel of its own that also writes the
    cache, which the attention does now."""
    self._used_fused_qk_norm_rope_last_call = True
    if not _is_plain(self, positions):
        raise NotImplementedError(f"{type(self).__name__} with {type(self.rotary_emb).__name__} has no kernel in common with the trainer")
    return _prepare(self, qkv, positions)


def _is_plain(attention: Any, positions: torch.Tensor) -> bool:
    """Return whether one kernel normalizes and rotates the heads of an attention of SGLang."""
    embedding, dim = attention.rotary_emb, attention.head_dim
    whole = embedding.rotary_dim == dim and dim & (dim - 1) == 0 and embedding.cos_sin_cache.dtype == torch.float32
    return whole and positions.dim() == 1 and attention.q_norm.variance_epsilon == attention.k_norm.variance_epsilon


def _prepare(attention: Any, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    rotation = Rotation(*_read_tables(attention.rotary_emb), positions, not attention.rotary_emb.is_neox_style)
    query, key = (x.unflatten(1, (-1, attention.head_dim)) for x in (q, k))
    norms = attention.q_norm.weight, attention.k_norm.weight
    query, key = heads.normalize_and_turn_heads(query, key, norms, attention.q_norm.variance_epsilon, rotation)
    return query.flatten(1), key.flatten(1), v


def _read_tables(embedding: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous cosines and sines `[positions, pairs]`. SGLang, which has them side by side, may put longer ones in their place."""
    table, made = embedding.cos_sin_cache, getattr(embedding, "megatron_rl_tables", None)
    if made is None or made[0] is not table:
        made = (table, *(half.contiguous() for half in table.chunk(2, -1)))
        embedding.megatron_rl_tables = made
    return made[1], made[2]


def multiply_by_gate(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Replace `SiluAndMul.forward_cuda`: return silu(gate) up `[..., F]` of x `[..., 2 F]`."""
    return quantized_rows.multiply_by_gate(x) if quantized_rows.quantizes(self, x) else swiglu.multiply(x)


def sample(
    original: Callable[..., Any],
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: Any,
    token_ids_logprobs: Any,
    positions: torch.Tensor,
    *,
    logprob_logits: torch.Tensor | None = None,
) -> Any:
    """Wrap `Sampler.forward`: log-probs of sampled tokens are the trainer's, over all tokens and, for requests with a filter, over those
    that it kept. SGLang overwrites the logits, which are divided by the temperatures here as there."""
    rest = top_logprobs_nums, token_ids_logprobs, positions
    scaled = (logits_output.next_token_logits.float() / sampling_info.temperatures).contiguous() if return_logprob else None
    tokens = original(self, logits_output, sampling_info, return_logprob, *rest, logprob_logits=logprob_logits)
    if scaled is not None:
        logits_output.next_token_logprobs = _score(scaled, tokens)
        if (mask := logits_output.sampling_mask_output) is not None:
            rows = sampling_info.sampling_mask_batch_indices
            mask.selected_logprobs = _score(_keep(scaled[rows], mask.token_ids, mask.lengths), tokens[rows])
    return tokens


def _score(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax, float32 `[n]`, of logits `[n, vocabulary]` at the tokens."""
    parts = vocabulary.count_parts(logits.shape[-1], 1)
    return vocabulary.combine(vocabulary.summarize(logits, tokens.long(), 1.0, parts)).logprobs


def _keep(logits: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return logits `[n, vocabulary]` with -inf for all but the first `lengths` `[n]` of the `kept` ids `[n, most]`."""
    size = logits.shape[-1]
    beyond = torch.arange(kept.shape[1], device=kept.device) >= lengths.unsqueeze(1)
    left_out = torch.ones(len(logits), size + 1, dtype=torch.bool, device=logits.device)  # the last column takes what is beyond
    return logits.masked_fill(left_out.scatter_(1, kept.long().masked_fill(beyond, size), False)[:, :size], -torch.inf)
