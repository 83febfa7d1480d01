"""SGLang's operators on a CPU with the trainer's formulas."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from megatron_rl.kernels.batch_invariant import multiply_heads
from rollout_sglang.hooks import cpu_kernels, cpu_mla


def test_a_bias_is_added_to_the_rounded_product():
    """As Megatron's layers do; one product with a bias would be rounded once."""
    x, weight, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in ((40, 256), (64, 256), (64,)))
    y = cpu_kernels.apply_plain_linear(None, SimpleNamespace(weight=weight), x, bias)
    assert torch.equal(y, x @ weight.t() + bias) and not torch.equal(y, F.linear(x, weight, bias))
    assert torch.equal(cpu_kernels.apply_plain_linear(None, SimpleNamespace(weight=weight), x[:1]), (x @ weight.t())[:1])


def test_both_products_of_the_absorbed_form_are_the_trainers():
    x, weight, other = torch.randn(5, 4, 128), torch.randn(4, 64, 128), torch.randn(64, 64)
    out = torch.empty(5, 4 * 64)

    def forward(factor: torch.Tensor, scale: float) -> torch.Tensor:  # as SGLang has them: w_kc is transposed, w_vc's result has a place
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.view(5, 4, 64).transpose(0, 1))
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1) @ factor * scale

    wanted = multiply_heads(x, weight)
    assert torch.equal(cpu_mla.multiply_invariantly(forward, other, scale=2.0), wanted @ other * 2.0)
    assert torch.equal(out, wanted.flatten(1))
