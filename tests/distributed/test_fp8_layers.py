"""The FP8 layers in Megatron: the three products of the contract, with and without parallelism."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.golden import slow_fp8
from support.trainer import build_quantized_layer

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
