"""Products by the tree on a GPU: the reference's sums where those are exact, and the same bits for any tokens, ranks and CUDA graph."""

import itertools

import pytest
import torch
from support.fp8_reference import uneven
from support.tree_sums import check_kernel

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import quantize_weight
from parallel.formats import FP8

pytestmark = pytest.mark.gpu
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_leaves_are_added_as_on_a_cpu(dtype):
    for leaves in (*range(1, 10), 22, 112, 200):
        check_kernel(70, 130, leaves * 128, "cuda", dtype)
    if dtype != torch.float8_e4m3fn:
        check_kernel(70, 130, 576, "cuda", dtype)


def make_product(k, n, dtype):
    """(x and its scales, weight and its scales), ordinary values, of 1000 tokens."""
    x, weight = uneven(1000, k, torch.bfloat16, "cuda"), torch.randn(n, k, device="cuda") * 0.02
    if dtype != torch.float8_e4m3fn:
        return (x.to(dtype),), (weight.to(dtype),)
    backend = make_backend("deep_gemm", FP8.with_scales("pow2"))
    return backend.quantize(x, rows=True, columns=False).rows, tuple(quantize_weight(weight, "pow2"))


def multiply(x, weight):
    return tree.multiply_blocks(x, weight) if len(x) == 2 else tree.multiply(x[0], weight[0])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_bits_depend_on_neither_tokens_nor_ranks(dtype, record_property):
    for k, n in ((4096, 2048), (14336, 4096)):
        x, weight = make_product(k, n, dtype)
        whole = multiply(x, weight)
        for tokens in (1, 7, 64, 300):
            assert torch.equal(multiply(tuple(each[:tokens] for each in x), weight), whole[:tokens]), tokens
        for ranks in (2, 4, 8):
            parts = zip(*([part.contiguous() for part in each.chunk(ranks, 1)] for each in (*x, *weight)), strict=True)
            assert torch.equal(tree.add([multiply(part[: len(x)], part[len(x) :]) for part in parts]), whole), ranks
        if len(x) == 1:
            exact = x[0].double() @ weight[0].double().t()
            record_property(f"K={k}: largest error of the tree / of cuBLAS", measure_ratio(whole, x[0] @ weight[0].t(), exact))


def measure_ratio(by_tree, fast, exact):
    return float((by_tree - exact).abs().max() / (fast - exact).abs().max().clamp_min(1e-30))


def test_a_captured_graph_multiplies_anew():
    """As an engine decodes: the launches are recorded once, and replayed on other values."""
    for dtype, tokens in itertools.product(DTYPES[:2], (1, 64)):
        x, weight = make_product(4096, 2048, dtype)
        x = tuple(each[:tokens].contiguous() for each in x)
        multiply(x, weight)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = multiply(x, weight)
        x[0].copy_(x[0].flip(0).flip(1))
        graph.replay()
        assert torch.equal(result, multiply(x, weight))
