"""SGLang's batched products of latent attention run as the trainer's, whatever the batch."""

from __future__ import annotations

import torch

from megatron_rl.kernels.batch_invariant import multiply_heads
from rollout_sglang.hooks import cpu_mla


def test_both_products_of_the_absorbed_form_are_the_trainers():
    x, weight, other = torch.randn(5, 4, 128), torch.randn(4, 64, 128), torch.randn(64, 64)
    out = torch.empty(5, 4 * 64)

    def forward(factor: torch.Tensor, scale: float) -> torch.Tensor:  # as SGLang has them: w_kc is transposed, w_vc's result has a place
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.view(5, 4, 64).transpose(0, 1))
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1) @ factor * scale

    wanted = multiply_heads(x, weight)
    assert torch.equal(cpu_mla.multiply_invariantly(forward, other, scale=2.0), wanted @ other * 2.0)
    assert torch.equal(out, wanted.flatten(1))
