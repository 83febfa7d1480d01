"""Megatron's shared experts with a gate whose bits do not depend on the batch."""

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_rl.kernels.experts.shared_gate import gate_shared_experts
from megatron_rl.mcore.layers.linear.weight_gradient import take_weight


class SharedExperts(SharedExpertMLP):
    """Shared experts, gated if `config.moe_shared_expert_gate`. `gate_weight` [1, h] is whole on every tensor-parallel rank."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]."""
        output, _ = MLP.forward(self, hidden_states)
        return output if self.gate_weight is None else gate_shared_experts(hidden_states, take_weight(self.gate_weight), output)
