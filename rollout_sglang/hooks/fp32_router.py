"""FP32 routers of mixture-of-experts layers, as in Megatron. SGLang rounds the logits of Qwen3-MoE to the model's dtype, and on a CPU also
those of DeepSeek-V3. If BF16 rounds two logits to the same number, a different expert may be chosen."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.kernels.batch_invariant import invariant_matmul


def compute_router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 logits `[T, experts]` of x `[T, H]` and weight `[experts, H]` in any float dtype."""
    return invariant_matmul(x.float(), weight.float())


def use_fp32_gate(original: Callable[..., Any], moe_layer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `Qwen3MoeSparseMoeBlock.__init__` and others: let the gate, which gpt-oss names `router`, use `compute_router_logits`."""
    original(moe_layer, *args, **kwargs)
    gate = moe_layer.gate if hasattr(moe_layer, "gate") else moe_layer.router
    method_name = type(gate.quant_method).__name__
    if method_name != "UnquantizedLinearMethod":
        raise NotImplementedError(f"a router in {method_name} is outside the precision contract")
    gate.quant_method = _make_router_method()()


def use_model_dtype(original: Callable[..., Any], gate: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `Glm4MoeGate.__init__`: keep the weight in the model's dtype, as in the checkpoint and the trainer. SGLang widens it to FP32,
    and for this family lets all FP32 products round their inputs to TF32."""
    original(gate, *args, **kwargs)
    torch.set_float32_matmul_precision("highest")
    gate.weight = torch.nn.Parameter(gate.weight.to(torch.get_default_dtype()))


def use_model_dtype_and_fp32(original: Callable[..., Any], moe_layer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `MiniMaxM2MoE.__init__`: do both, because SGLang stores the gate in FP32, which may have been rounded in the trainer."""
    use_fp32_gate(original, moe_layer, *args, **kwargs)
    moe_layer.gate.weight.data = moe_layer.gate.weight.data.to(torch.get_default_dtype())


def compute_gate_logits(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace `MoEGate.forward` of DeepSeek-V3 and `Glm4MoeGate.forward`."""
    return compute_router_logits(hidden_states, self.weight)


@functools.cache
def _make_router_method() -> type:
    """Return the class of the gate's method. Imports inside the function, because SGLang finds its plug-ins before it can be imported."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class Fp32RouterMethod(UnquantizedLinearMethod):
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            logits = compute_router_logits(x, layer.weight)
            return logits if bias is None else logits + bias.float()

    return Fp32RouterMethod
