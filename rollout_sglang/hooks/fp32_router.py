"""The router of a mixture of experts in FP32, as Megatron computes it (`moe_router_dtype = "fp32"`): logits are products of FP32 values and
stay FP32. SGLang rounds those of Qwen3-MoE to the model's dtype, and on a CPU those of DeepSeek-V3 as well; on a GPU its kernels for
DeepSeek-V3 give FP32. Two logits that BF16 cannot tell apart choose another expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.precision.ops.batch_invariant import invariant_matmul


def compute_router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H], weight [experts, H] in any float dtype; returns float32 [T, experts]."""
    return invariant_matmul(x.float(), weight.float())


def use_fp32_gate(original: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> None:
    """Around `Qwen3MoeSparseMoeBlock.__init__`: its gate gets a method that computes `compute_router_logits`."""
    original(block, *args, **kwargs)
    if type(block.gate.quant_method).__name__ != "UnquantizedLinearMethod":
        raise NotImplementedError(f"a router in {type(block.gate.quant_method).__name__} is outside the precision contract")
    block.gate.quant_method = _make_router_method()()


def compute_gate_logits(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands in for DeepSeek-V3's `MoEGate.forward`."""
    return compute_router_logits(hidden_states, self.weight)


@functools.cache
def _make_router_method() -> type:
    """Made late: SGLang is imported after its plug-ins are found."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class Fp32RouterMethod(UnquantizedLinearMethod):
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if bias is not None:
                raise NotImplementedError("a router with a bias is outside the precision contract")
            return compute_router_logits(x, layer.weight)

    return Fp32RouterMethod
