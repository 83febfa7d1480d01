"""Patches of Megatron: forward products with the engine's bits, and names that Megatron leaves undefined without Transformer Engine."""

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.mcore.platform import cpu

FUNCTIONS = {  # arguments after input and weight: bias, ...
    layers.LinearWithFrozenWeight: (None, False, None),
    layers.LinearWithGradAccumulationAndAsyncCommunication: (None, False, False, False, None, None, None, 1),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_products_have_the_engines_bits_and_gradients(function, monkeypatch):
    """A token's bits must not depend on the other tokens of its batch."""
    for patched in FUNCTIONS:  # undone at the end
        monkeypatch.setattr(patched, "forward", patched.forward)
    cpu._patch_linear_products()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 2048, generator=generator).bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(512, 2048, generator=generator)).bfloat16()
    y = function.apply(x, weight, *FUNCTIONS[function])
    for count in (1, 20, 100):
        assert torch.equal(y[:count, 0], invariant_matmul(x[:count, 0].detach(), weight))
    y.float().sum().backward()
    torch.testing.assert_close(x.grad[7, 0].float(), weight.float().sum(0), rtol=1e-2, atol=1e-2)


def test_a_router_on_a_gpu_works_without_transformer_engine(monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    logits = moe_utils.router_gating_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(logits, x @ weight.t())
    logits.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, 8))
