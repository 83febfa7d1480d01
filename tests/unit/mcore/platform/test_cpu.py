"""Patches of Megatron: forward products with the engine's bits."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.mcore.platform import products

FUNCTIONS = {  # arguments after input and weight: bias, ...
    layers.LinearWithFrozenWeight: (None, False, None),
    layers.LinearWithGradAccumulationAndAsyncCommunication: (None, False, False, False, None, None, None, 1),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_products_have_the_engines_bits_and_gradients(function, monkeypatch):
    """A token's bits must not depend on the other tokens of its batch."""
    for patched in FUNCTIONS:  # undone at the end
        monkeypatch.setattr(patched, "forward", patched.forward)
    products.patch_linear_products()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 2048, generator=generator).bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(512, 2048, generator=generator)).bfloat16()
    y = function.apply(x, weight, *FUNCTIONS[function])
    for count in (1, 20, 100):
        assert torch.equal(y[:count, 0], invariant_matmul(x[:count, 0].detach(), weight))
    y.float().sum().backward()
    torch.testing.assert_close(x.grad[7, 0].float(), weight.float().sum(0), rtol=1e-2, atol=1e-2)
