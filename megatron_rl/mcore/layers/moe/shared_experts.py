"""Megatron's shared experts with a gate (Qwen2-MoE, Qwen3-Next, Qwen3.5-MoE) whose bits do not depend on the batch."""

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.kernels.gates.reference import gate
from megatron_rl.mcore.base.weight_gradient import take_weight


class SharedExperts(SharedExpertMLP):
    """Shared experts, multiplied by sigmoid(w . x) if `config.moe_shared_expert_gate`. The gate's logits are rounded to the dtype of x, and
    the product once. Its weight w, `gate_weight` [1, h], is whole on every tensor-parallel rank."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]."""
        output, _ = MLP.forward(self, hidden_states)
        return output if self.gate_weight is None else gate(output, invariant_matmul(hidden_states, take_weight(self.gate_weight)))
