"""The FP8 layers in Megatron: the three products of the contract, with and without parallelism."""

import pytest
import torch
import torch.distributed as dist
from support.fp8_reference import uneven_matrix
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


@pytest.fixture(scope="module", params=["pow2", "fp32"])
def case(request):
    """Scale format, weight, x and dy, and the operands of each product by the slow definitions."""
    arrays = [uneven_matrix(*shape, seed).numpy() for seed, shape in enumerate(((N, K), (S * B, K), (S * B, N)))]
    return request.param, [torch.from_numpy(array) for array in arrays], slow_fp8.multiply(*arrays, request.param)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("ranks, sequence_parallel", [(1, False), (2, False), (2, True)])
def test_products_are_those_of_the_contract(worlds, case, kind, ranks, sequence_parallel):
    scale_format, (weight, x, dy), products = case
    arguments = (kind, scale_format, sequence_parallel, weight, x.view(S, B, K), dy.view(S, B, N))
    for results in worlds(ranks).call(run_layer, *arguments):
        for got, (left, right) in zip(results, products, strict=True):
            slow_fp8.assert_product(got.reshape(len(left), -1), left, right)
