"""The backward pass of FP8 layers with Megatron's options: recomputation, gradient buffers, experts."""

import pytest
import torch
import torch.distributed as dist
from support.models import FP8
from support.trainer import Trainer, build_quantized_layer

from megatron_rl.kernels.linear import reference as fp8_products
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight

N, K = 256, 512


def accumulate_weight_gradient(sequence_parallel, weight, x, dy):
    """Return WGrad of a column-parallel layer on this rank: `once` for all tokens, x `[s, 1, K]` and dy `[s, 1, N]`, and `added` to a
    gradient buffer in two halves. Check Megatron's protocol: the buffer is used, its flag is set, and autograd gets no gradient."""
    layer = build_quantized_layer("column", "pow2", sequence_parallel, weight)
    tp, rank = dist.get_world_size(), dist.get_rank()

    def backward(x, dy):
        layer.weight.grad = None  # as DDP does
        own_tokens = x.chunk(tp)[rank] if sequence_parallel else x
        layer(own_tokens.clone().requires_grad_(True))[0].backward(dy.chunk(tp, dim=2)[rank].contiguous())

    backward(x, dy)
    once, layer.weight.main_grad = layer.weight.main_grad, torch.zeros(layer.weight.shape)
    for half in zip(x.chunk(2), dy.chunk(2), strict=True):
        layer.weight.grad_added_to_main_grad = False
        backward(*half)
        assert layer.weight.grad_added_to_main_grad
    return {"once": once, "added": layer.weight.main_grad}


def run_expert(kind, weight, x, dy):
    """Return y, dx and dw of this rank's slice of an expert whose tokens the dispatcher has already exchanged: the layer itself must
    neither gather nor sum. x is `[T, K of the rank]`, dy is `[T, N of the rank]`."""
    layer = build_quantized_layer(kind, "pow2", dist.get_world_size() > 1, weight, is_expert=True, skip_bias_add=True)
    x = x.clone().requires_grad_(True)
    y, _ = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.main_grad


def compute_gradients(folder, precision, recompute):
    """Return this rank's gradients of an arbitrary loss under sequence parallelism. FP8 layers add theirs to a gradient buffer."""
    model = Trainer(folder, precision, {"recompute": recompute}).actor.model
    assert model.config.sequence_parallel
    for layer in find_quantized_layers(model).values():
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    runs = []
    first = model.decoder.layers[0].mlp.linear_fc1
    first.register_forward_hook(lambda *_: runs.append(1))
    tokens = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(3))
    model.train()
    logits = model(tokens, torch.arange(48).expand(4, 48).contiguous(), None)
    logits.float().square().mean().backward()
    assert len(runs) == (1 if recompute == "none" else 2), f"the layer ran {len(runs)} times"
    return {name: getattr(p, "main_grad", p.grad).clone() for name, p in model.named_parameters()}


def values(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("high", ["fp32", "bf16"])
def test_recomputed_activations_give_the_same_gradients(worlds, checkpoint, high):
    """They are equal bit for bit: the same forward pass runs twice on the same blocks."""
    ways = ("none", "selective", "full")
    for rank, (kept, *others) in enumerate(
        zip(*(worlds(2).call(compute_gradients, checkpoint, {**FP8, "high": high}, way) for way in ways), strict=True)
    ):
        assert all(gradient.any() for gradient in kept.values())
        for gradients in others:
            assert gradients.keys() == kept.keys() and all(torch.equal(gradients[name], kept[name]) for name in kept), f"rank {rank}"


@pytest.mark.parametrize("ranks, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_two_micro_batches_add_up_to_one(worlds, ranks, sequence_parallel):
    """256 tokens are split at 128, a boundary of WGrad's groups, so that only the order of FP32 sums differs."""
    weight, x, dy = values(N, K, seed=1), values(256, 1, K, seed=2), values(256, 1, N, seed=3)
    results = worlds(ranks).call(accumulate_weight_gradient, sequence_parallel, weight, x, dy)
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
    for rank, (y, dx, dw) in enumerate(worlds(2).call(run_expert, kind, weight, x, dy)):
        part = dequantize_weight(quantize_weight(weight.chunk(2, dim=0 if kind == "column" else 1)[rank], "pow2"))
        expected = fp8_products.fprop(x, part, "pow2"), fp8_products.dgrad(dy, part, "pow2"), fp8_products.wgrad(dy, x, "pow2")
        for product, expected_product in zip((y, dx, dw), expected, strict=True):  # the order of FP32 sums may follow the number of threads
            assert torch.allclose(product, expected_product, rtol=1e-5, atol=1e-6 * float(expected_product.norm())), f"rank {rank}"
