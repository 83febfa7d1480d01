"""The backward pass of FP8 layers with Megatron's options: recomputation, gradient buffers, experts."""

from __future__ import annotations

import pytest
import torch
from support import megatron_models, trainer
from support.models import FP8

from megatron_rl.kernels.linear import reference as fp8_products
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight

N, K = 256, 512


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("high", ["fp32", "bf16"])
def test_recomputed_activations_give_the_same_gradients(worlds, checkpoint, high):
    """They are equal bit for bit: the same forward pass runs twice on the same blocks."""
    ways = ("none", "selective", "full")
    for rank, (kept, *others) in enumerate(
        zip(*(worlds(2).call(trainer.gradients, checkpoint, {**FP8, "high": high}, way) for way in ways), strict=True)
    ):
        assert all(gradient.any() for gradient in kept.values())
        for gradients in others:
            assert gradients.keys() == kept.keys() and all(torch.equal(gradients[name], kept[name]) for name in kept), f"rank {rank}"


@pytest.mark.parametrize("ranks, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_two_micro_batches_add_up_to_one(worlds, ranks, sequence_parallel):
    """256 tokens are split at 128, a boundary of WGrad's groups, so that only the order of FP32 sums differs."""
    weight, x, dy = values(N, K, seed=1), values(256, 1, K, seed=2), values(256, 1, N, seed=3)
    results = worlds(ranks).call(megatron_models.accumulate_weight_gradient, sequence_parallel, weight, x, dy)
    for result in results:
        assert result["once"].shape == (N // ranks, K)
        assert torch.allclose(result["added"], result["once"], rtol=1e-5, atol=1e-5 * float(result["once"].abs().max()))


@pytest.mark.parametrize("tokens", [140, 0])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_an_experts_layer_leaves_communication_to_the_dispatcher(worlds, kind, tokens):
    """Each rank returns the products of its own slice, also under sequence parallelism, and without tokens."""
    weight = values(N, K, seed=4)
    n, k = (N // 2, K) if kind == "column" else (N, K // 2)
    x, dy = values(tokens, k, seed=5), values(tokens, n, seed=6)
    for rank, (y, dx, dw) in enumerate(worlds(2).call(megatron_models.run_expert, kind, weight, x, dy)):
        part = dequantize_weight(quantize_weight(weight.chunk(2, dim=0 if kind == "column" else 1)[rank], "pow2"))
        expected = fp8_products.fprop(x, part, "pow2"), fp8_products.dgrad(dy, part, "pow2"), fp8_products.wgrad(dy, x, "pow2")
        for product, expected_product in zip((y, dx, dw), expected, strict=True):  # the order of FP32 sums may follow the number of threads
            assert torch.allclose(product, expected_product, rtol=1e-5, atol=1e-6 * float(expected_product.norm())), f"rank {rank}"
