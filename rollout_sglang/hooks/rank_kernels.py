"""Products, attention, and rotary tables of an engine on a GPU with `precision.reduction = "ranks"`: the kernels that the trainer runs, in
the same order of sums. A call that would fall back to another kernel raises."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.kernels import plain
from megatron_rl.kernels.attention import flash3
from megatron_rl.kernels.rope.reference import make_tables

FP8_FUNCTION = "deepgemm_w8a8_block_fp8_linear_with_fallback"


def load_model(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """Wrap `ModelRunner.load_model`: BF16 products of this process are those of the trainer."""
    plain.share_products()
    return original(self, *args, **named)


def apply_plain_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Replace `UnquantizedLinearMethod.apply`. The bias is added to the rounded product, as in Megatron."""
    y = _multiply(x, layer.weight)
    return y if bias is None else y + bias


def refuse_product(self: Any, *_: Any, **__: Any) -> Any:
    """Replace methods of `UnquantizedLinearMethod` that add within the product, or write it elsewhere."""
    raise NotImplementedError("SGLang asks for a product of its own, but precision.reduction = 'ranks' shares DeepGEMM's with the trainer")


def compute_lm_head(self: Any, hidden: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """Replace `LogitsProcessor._compute_lm_head`: return logits `[n, vocabulary / tp]`, rounded to BF16 as in the trainer."""
    if hasattr(lm_head, "set_lora") or embedding_bias is not None or self.use_fp32_lm_head or self.use_fp32_lm_head_output:
        raise NotImplementedError("an adapter, a bias or FP32 logits in the output layer are outside of precision.reduction = 'ranks'")
    return _multiply(hidden, lm_head.weight)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not plain.takes(x, weight):
        raise NotImplementedError(f"a product of {x.dtype} and {weight.dtype} on {x.device} has no kernel in common with the trainer")
    return plain.multiply(x, weight)


def require_deep_gemm(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Wrap `dispatch_w8a8_block_fp8_linear`: raise RuntimeError unless SGLang multiplies block-FP8 layers by DeepGEMM."""
    function = original(*args, **named)
    if getattr(function, "__name__", "") != FP8_FUNCTION:
        raise RuntimeError(f"SGLang multiplies FP8 by {function}, but precision.reduction = 'ranks' needs DeepGEMM")
    return function


def refuse_fallback(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Replace `triton_w8a8_block_fp8_linear`, to which SGLang falls back for shapes and dtypes that DeepGEMM does not take."""
    found = f"{input.dtype} with a weight {list(weight.shape)}"
    raise NotImplementedError(f"DeepGEMM does not multiply {found}: it needs bfloat16, N % 64 = 0 and K % 128 = 0")


def start_attention(original: Callable[..., None], self: Any, runner: Any, *args: Any, **named: Any) -> None:
    """Wrap `FlashAttentionBackend.__init__`: attend in one split, without metadata that SGLang computes for a single query."""
    original(self, runner, *args, **named)
    from sgl_kernel import flash_attn
    from sglang.kernels.ops.attention import flash_attention_v3 as fa3

    if not fa3._is_fa3_supported():
        raise RuntimeError("FlashAttention 3, which precision.reduction = 'ranks' needs, does not run on this GPU")
    loaded = fa3._load_fa3_kernels()["flash_attn_with_kvcache"]
    if self.fa_impl_ver != 3 or loaded is not flash_attn.flash_attn_with_kvcache:
        raise RuntimeError(f"the engine attends by {loaded}, version {self.fa_impl_ver}, and the trainer by {flash3.KERNEL}, version 3")
    self.num_splits = self.decode_num_splits = 1
    self._disable_scheduler_metadata_precompute = True


def attend(original: Callable[..., Any], *, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **named: Any) -> Any:
    """Wrap `flash_attn_with_kvcache`, for prompts and decoded tokens: the trainer's blocks of keys. `max_seqlen_q` is an upper bound, so
    two queries may be announced for one."""
    flash3.check_heads(q, k_cache, v_cache)
    whole = tuple(named.get("window_size", (-1, -1))) == (-1, -1) and not named.get("softcap") and named.get("sinks") is None
    plain_causal = named["causal"] and whole and named.get("qv") is None
    if not plain_causal or named["num_splits"] != 1 or named.get("scheduler_metadata") is not None or named["ver"] != 3:
        raise NotImplementedError("attention with splits, a window, sinks or a cap is outside of precision.reduction = 'ranks'")
    named["max_seqlen_q"] = max(named["max_seqlen_q"], flash3.MIN_QUERIES)
    return original(q=q, k_cache=k_cache, v_cache=v_cache, **named)


def make_cos_sin(self: Any) -> torch.Tensor:
    """Replace `RotaryEmbedding._compute_cos_sin_cache`: return cosines and sines, float32 `[positions, 2 * pairs]`, of the trainer's
    function."""
    frequencies = self._compute_inv_freq(self.base)
    positions = torch.arange(self.position_start, self.position_start + self.max_position_embeddings, dtype=torch.float32)
    return torch.cat(make_tables(torch.outer(positions.to(frequencies.device), frequencies)), -1)
