"""Multi-head latent attention (MLA, DeepSeek-V3) on a CPU without Intel's kernels: three functions that SGLang supports only on a GPU or
AMX, and the two products whose bits would depend on the batch.

Prompts and decoded tokens both use the absorbed form: attention in the latent space, with w_kc and w_vc, the parts of kv_b_proj. SGLang
derives these from kv_b_proj after loading weights and again at the end of every weight update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_rl.kernels.batch_invariant import multiply_heads
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK


def get_handler(original: Callable[..., Any], registry: Any, backend: str) -> Callable[[Any, Any], Any]:
    """Wrap `AttentionBackendRegistry.get_handler`: PyTorch's attention uses the absorbed form for prompts too. It reads keys and values
    from the cache, which holds latents. SGLang would treat it like Triton's attention, which takes them as arguments."""
    if backend != "torch_native":
        return original(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


def get_rotary_embedding(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap `get_rope_wrapper`: use the ordinary embedding without "rope_scaling". SGLang's CPU branch supports only YaRN."""
    if kwargs.get("rope_scaling") is not None:
        return original(*args, **kwargs)
    return original(*args, **{**kwargs, "device": None})


def dequantize_kv_b(data: torch.Tensor, scale: torch.Tensor, block_size: list[int]) -> tuple[torch.Tensor, float]:
    """Replace `block_quant_to_tensor_quant`, which makes w_kc and w_vc: return the dequantized blocks in the model's dtype and a scale
    of one. SGLang's CPU branch would requantize kv_b_proj with a single scale. Its GPU branch dequantizes too."""
    if block_size != [BLOCK, BLOCK]:
        raise NotImplementedError(f"block size {block_size} is outside the precision contract")
    return dequantize_weight(QuantizedWeight(data, scale)).to(torch.get_default_dtype()), 1.0


class _InvariantHeadProducts(TorchFunctionMode):
    """Context manager in which `torch.bmm` of `[h, T, K]` and `[h, K, N]` is `multiply_heads`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.bmm:
            return function(*args, **(kwargs or {}))
        product = multiply_heads(args[0].transpose(0, 1), args[1].transpose(1, 2)).transpose(0, 1)
        return kwargs["out"].copy_(product) if kwargs else product


def multiply_invariantly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap `forward_absorb_prepare`, which multiplies queries by w_kc, and `forward_absorb_core`, which multiplies attended latents by
    w_vc: use the trainer's operator."""
    with _InvariantHeadProducts():
        return original(*args, **kwargs)
