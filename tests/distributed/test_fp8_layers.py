"""The FP8 layers in Megatron: the three products of the contract, with parallelism, recomputation, gradient buffers and experts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.golden import slow_fp8
from support.models import FP8
from support.trainer import Trainer, build_quantized_layer

from megatron_rl.kernels.linear import reference as fp8_products
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight

S, B, N, K = 80, 2, 256, 512  # S * B tokens are no multiple of 128 on purpose


def run_layer(kind, scale_format, sequence_parallel, weight, x, dy):
    """Return FProp, DGrad and WGrad of the whole layer, assembled from all ranks on every rank: y `[s, b, N]`, dx `[s, b, K]`, dw `[N, K]`.

    `kind` is "column" (N split over ranks) or "row" (K split). `weight` `[N, K]`, `x` `[s, b, K]` and `dy` `[s, b, N]` belong to the whole
    layer.
    """
    layer = build_quantized_layer(kind, scale_format, sequence_parallel, weight)
    tp, rank = dist.get_world_size(), dist.get_rank()
    column = kind == "column"
    split, whole = (0, 1) if column else (1, 0)

    def part(tensor, along_features):
        """Return this rank's part of an activation: of its features, of its sequence under sequence parallelism, or all of it."""
        if along_features:
            return tensor.chunk(tp, dim=2)[rank].contiguous()
        return tensor.chunk(tp, dim=0)[rank].contiguous() if sequence_parallel else tensor

    def joined(tensor, along_features):
        if not along_features and not sequence_parallel:
            return tensor
        return _gather(tensor, 2 if along_features else 0)

    input_part = part(x, along_features=not column).clone().requires_grad_(True)
    y, _ = layer(input_part)
    y.backward(part(dy, along_features=column))
    assert layer.weight.shape[whole] == weight.shape[whole]
    return (
        joined(y.detach(), along_features=column),
        joined(input_part.grad, along_features=not column),
        _gather(layer.weight.main_grad, split),
    )


def _gather(tensor, dim):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def uneven(rows, cols, seed):
    """Return float32 values whose blocks differ a lot in magnitude, so that a scale of the wrong block is noticed."""
    random = np.random.default_rng(seed)
    sizes = np.exp2(random.integers(-6, 6, (-(-rows // 32), -(-cols // 32))))
    return (random.standard_normal((rows, cols)) * np.kron(sizes, np.ones((32, 32)))[:rows, :cols]).astype(np.float32)


@pytest.fixture(scope="module")
def operands():
    return uneven(N, K, 1), uneven(S * B, K, 2), uneven(S * B, N, 3)


@pytest.fixture(scope="module", params=["pow2", "fp32"])
def expected(request, operands):
    """(scale format, float64 operands of each product), quantized by the slow definitions."""
    weight, x, dy = operands
    form = request.param
    codes, scales = slow_fp8.quantize_matrix(weight, form)
    blocks = slow_fp8.from_codes(codes) * np.kron(scales.astype(np.float64), np.ones((128, 128)))
    x_tokens, dy_tokens = (slow_fp8.round_trip_rows(np.ascontiguousarray(values.T), form) for values in (x, dy))
    products = {
        "y": (slow_fp8.round_trip_rows(x, form), blocks.T),
        "dx": (slow_fp8.round_trip_rows(dy, form), blocks),
        "dw": (dy_tokens, x_tokens.T),
    }
    return form, {name: (left.astype(np.float64), right.astype(np.float64)) for name, (left, right) in products.items()}


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("ranks, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_products_are_those_of_the_contract(worlds, operands, expected, kind, ranks, sequence_parallel):
    scale_format, products = expected
    weight, x, dy = (torch.from_numpy(values) for values in operands)
    arguments = (kind, scale_format, sequence_parallel, weight, x.view(S, B, K), dy.view(S, B, N))
    for rank, results in enumerate(worlds(ranks).call(run_layer, *arguments)):
        for (name, (left, right)), got in zip(products.items(), results, strict=True):
            error = np.abs(got.double().numpy().reshape(left.shape[0], right.shape[1]) - left @ right)
            # FP32 sums in any order; one wrongly quantized element would be 2^-4 of a term
            assert (error <= 1e-6 * (np.abs(left) @ np.abs(right)) + 1e-30).all(), f"rank {rank}: {name} is off by {error.max()}"


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
