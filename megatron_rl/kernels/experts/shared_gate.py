"""The gate of shared experts (Qwen2-MoE, Qwen3-Next, Qwen3.5-MoE): y = shared(x) sigmoid(w . x)."""

import torch

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.kernels.gates.reference import gate


def gate_shared_experts(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the gated output of shared experts, with gradient. Logits are rounded to the dtype of x, and the product once. On a CPU, the
    bits of a token do not depend on the batch.

    Args:
        x: `[..., h]`, the input of the shared experts.
        weight: `[1, h]`, in the dtype of x.
        output: `[..., h]`, what the shared experts compute from x.
    """
    return gate(output, invariant_matmul(x, weight))
