"""What the readers of trainer and engine share: where each operator's module is, and which parameters they have read. A parameter that no
known operator uses is refused: an incomplete graph proves nothing."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from megatron_rl.precision.graph.decoder import Operator
from megatron_rl.precision.graph.formats import unquantized_format
from megatron_rl.precision.graph.graph import TensorPrecision

FP32 = TensorPrecision("fp32")
MEGATRON, SGLANG = 0, 1
_MODULES = (  # (operator of a layer, Megatron's module, SGLang's module); of several rows, a model has one
    ("input_norm", "input_layernorm", "input_layernorm"),
    ("attention.qkv", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    ("attention.q_norm", "self_attention.q_layernorm", "self_attn.q_norm"),
    ("attention.k_norm", "self_attention.k_layernorm", "self_attn.k_norm"),
    ("attention.q_a", "self_attention.linear_q_down_proj", "self_attn.fused_qkv_a_proj_with_mqa"),
    ("attention.q_a_norm", "", "self_attn.q_a_layernorm"),  # Megatron's is a `q_layernorm` too
    ("attention.q_b", "self_attention.linear_q_up_proj", "self_attn.q_b_proj"),
    ("attention.q_b", "self_attention.linear_q_proj", "self_attn.q_proj"),
    ("attention.kv_a", "self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"),
    ("attention.kv_a", "", "self_attn.fused_qkv_a_proj_with_mqa"),
    ("attention.kv_a_norm", "self_attention.kv_layernorm", "self_attn.kv_a_layernorm"),
    ("attention.kv_b", "self_attention.linear_kv_up_proj", "self_attn.kv_b_proj"),
    ("attention.output", "self_attention.linear_proj", "self_attn.o_proj"),
    ("attention.post_norm", "self_attn_bda.norm", "post_self_attn_layernorm"),
    ("post_attention_norm", "pre_mlp_layernorm", "post_attention_layernorm"),
    ("mlp.gate_up", "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("mlp.down", "mlp.linear_fc2", "mlp.down_proj"),
    ("mlp.shared_experts.gate_up", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.gate_up_proj"),
    ("mlp.shared_experts.down", "mlp.shared_experts.linear_fc2", "mlp.shared_experts.down_proj"),
    ("mlp.post_norm", "mlp_bda.norm", "post_mlp_layernorm"),
)


class Reader(ABC):
    """Reads a model's operators and remembers the tensors that they use."""

    side: int  # MEGATRON or SGLANG
    hidden: TensorPrecision  # activations between operators

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def read_modules(self, layer: Any) -> dict[str, Operator]:
        """Read those operators of `_MODULES` that the layer has."""
        operators = {}
        for name, *paths in _MODULES:
            module = layer
            for attribute in paths[self.side].split("."):
                module = getattr(module, attribute, None)
            if module is None or type(module).__name__ == "IdentityOp":  # Megatron's for a norm that the model lacks
                continue
            x = self.read_residual(module) if name in ("input_norm", "post_attention_norm") else None
            operators[name] = self.read_weighted(module, x) if name.endswith("norm") else self.read_linear(module)
        return operators

    def read_weighted(self, module: Any, x: TensorPrecision | None = None, weight: Any = None) -> Operator:
        """Read a module that multiplies its weight, or `weight`, in high precision. `x`: format of the input, if not the hidden states'."""
        weight_format = self.read_tensor(module.weight if weight is None else weight)
        operator = Operator({"x": x or self.hidden}, type(module).__name__)
        return operator.with_inputs(weight=weight_format, bias=self.read_tensor(getattr(module, "bias", None)))

    def read_tensor(self, tensor: Any) -> TensorPrecision | None:
        """Return the format of a tensor without scales, or None if the module has none."""
        if not isinstance(tensor, torch.Tensor):
            return None
        self.seen.add(id(tensor))
        return unquantized_format(tensor)

    @abstractmethod
    def read_linear(self, module: Any) -> Operator:
        """Read a linear layer, quantized or not."""

    @abstractmethod
    def read_residual(self, norm: Any) -> TensorPrecision:
        """Return the format of the residual stream that a norm reads."""

    def find_unread(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> str | None:
        """Return the name of a parameter that no operator uses."""
        return next((name for name, parameter in parameters if id(parameter) not in self.seen), None)
