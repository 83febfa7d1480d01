"""SGLang's operators on the CPU, by the trainer's formulas."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from rollout_sglang.hooks import cpu_kernels


def test_a_bias_is_added_to_the_rounded_product():
    """As Megatron's layers do; one product with a bias would be rounded once."""
    x, weight, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in ((40, 256), (64, 256), (64,)))
    y = cpu_kernels.apply_plain_linear(None, SimpleNamespace(weight=weight), x, bias)
    assert torch.equal(y, x @ weight.t() + bias) and not torch.equal(y, F.linear(x, weight, bias))
    assert torch.equal(cpu_kernels.apply_plain_linear(None, SimpleNamespace(weight=weight), x[:1]), (x @ weight.t())[:1])
