"""Each back end on a Hopper GPU against `emulated` on the same operands: quantised bytes equal, products equal but for FP32 sums."""

from __future__ import annotations

import pytest
import torch
from support.fp8_reference import check_columns, check_kernel, check_rows, uneven

from megatron_rl.precision.backends import make_backend, requirements
from megatron_rl.precision.backends.base import Fp8Backend
from megatron_rl.precision.backends.deep_gemm_experts import DeepGemmExperts, pad_groups
from megatron_rl.precision.fp8 import Fp8Weight, quantize_1x128, quantize_128x1, quantize_weight

FORMATS = ("pow2", "fp32")
SHAPES = ((256, 512, 384), (1, 256, 512), (1000, 1536, 2048))  # tokens, N, K


def _lacks(name: str) -> str:
    return ", ".join(what for what, _ in requirements.find_missing(name))


BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(_lacks(name)), reason=f"{name}: {_lacks(name)}"))
    for name in ("deep_gemm", "transformer_engine")
]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_activation_kernel_gives_the_references_bytes(scale_format, dtype):
    pytest.importorskip("triton")
    for tokens, width in ((1, 128), (3, 384), (128, 128), (1000, 2048)):
        check_kernel(uneven(tokens, width, dtype, "cuda"), scale_format)
    check_kernel(uneven(640, 256, dtype, "cuda"), scale_format, groups=[128, 0, 384, 128])


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("name", BACKENDS)
def test_operands_are_the_references(name, scale_format):
    for tokens, width in ((16, 128), (1000, 2048)):
        x = uneven(tokens, width, torch.bfloat16, "cuda")
        operand = make_backend(name, scale_format).quantize(x, rows=True, columns=True)
        if name == "deep_gemm":
            check_rows(operand.rows, x, scale_format)
            check_columns(operand.columns, x, scale_format)
            continue
        data, scale = quantize_1x128(x, scale_format)
        assert torch.equal(operand.rows[0][:tokens], data.view(torch.uint8)) and torch.equal(operand.rows[1][:, :tokens], scale.t())
        data, scale = quantize_128x1(x, scale_format)
        assert torch.equal(operand.columns[0][:, :tokens], data.view(torch.uint8).t())
        assert torch.equal(operand.columns[1][:, :width], scale)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_the_references(name, scale_format, shape):
    """Tolerance, relative to the sum of the terms' sizes: a tensor core instruction of Hopper aligns 32 FP8 products to the largest and
    drops what lies below 2^-13 of it, 2^-8 in all at worst; all else is FP32. bf16 results are rounded once more, by 2^-8 of themselves.
    A wrong scale or a swapped block is far outside, and single bytes are tested above."""
    tokens, n, k = shape
    x, dy = uneven(tokens, k, torch.bfloat16, "cuda"), uneven(tokens, n, torch.bfloat16, "cuda")
    blocks = quantize_weight(uneven(n, k, torch.float32, "cuda"), scale_format)
    emulated = make_backend("emulated", scale_format)
    got = products(make_backend(name, scale_format), blocks, x, dy)
    exact = products(emulated, blocks, x.float(), dy.float())
    positive = blocks._replace(data=blocks.data.float().abs().to(blocks.data.dtype))
    sizes = products(emulated, positive, x.float().abs(), dy.float().abs())
    for what in ("fprop", "dgrad", "wgrad"):
        bound = 2**-8 * (sizes[what] + (0 if what == "wgrad" else exact[what].abs()))
        error = (got[what].float() - exact[what]).abs()
        assert (error <= bound).all(), f"{what}: {float((error - bound).max())} too far"


@pytest.mark.parametrize("name", BACKENDS)
def test_weight_gradients_are_added_in_place(name):
    x, dy = (uneven(512, width, torch.bfloat16, "cuda") for width in (256, 384))
    backend = make_backend(name, "pow2")
    operands = backend.quantize(dy, rows=False, columns=True), backend.quantize(x, rows=False, columns=True)
    alone = backend.wgrad(*operands, None)
    buffer = torch.ones_like(alone)
    assert backend.wgrad(*operands, buffer) is buffer
    assert torch.allclose(buffer, 1 + alone, rtol=1e-6, atol=1e-6 * float(alone.abs().max()))
    assert torch.equal(alone, backend.wgrad(*operands, None))  # the same sums in the same order


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("name", BACKENDS[:1])
def test_grouped_products_are_those_of_each_expert(name, scale_format):
    """The same sums within an expert, though tiles may differ: bf16 results may be neighbours, 2^-7 apart at most."""
    counts, n, k = [130, 0, 3, 700], 512, 256
    groups, places = pad_groups(counts, "cuda")
    grouped, single = DeepGemmExperts(scale_format), make_backend(name, scale_format)
    blocks = [quantize_weight(uneven(n + 128 * e, k, torch.float32, "cuda")[:n], scale_format) for e in range(len(counts))]
    x, dy = (uneven(sum(counts), width, torch.bfloat16, "cuda") for width in (k, n))
    forward, gradient = (
        grouped.quantize(v.new_zeros(sum(groups), v.shape[1]).index_copy_(0, places, v), groups, rows=True, columns=True) for v in (x, dy)
    )
    weight = grouped.prepare(blocks)
    y, dx = grouped.fprop(forward, weight, groups)[places], grouped.dgrad(gradient, weight, groups)[places]
    dw = grouped.wgrad(gradient, forward, groups)
    for expert, (xs, dys, ys, dxs) in enumerate(zip(*(v.split(counts) for v in (x, dy, y, dx)), strict=True)):
        one = products(single, blocks[expert], xs, dys)
        assert torch.allclose(ys.float(), one["fprop"].float(), rtol=2**-7)
        assert torch.allclose(dxs.float(), one["dgrad"].float(), rtol=2**-7)
        assert torch.allclose(dw[expert], one["wgrad"], rtol=1e-5, atol=1e-6 * float(one["wgrad"].norm()))


def products(backend: Fp8Backend, blocks: Fp8Weight, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    weight = backend.prepare(blocks, None)
    forward, gradient = (backend.quantize(v, rows=True, columns=True) for v in (x, dy))
    found = {"fprop": backend.fprop(forward, weight), "dgrad": backend.dgrad(gradient, weight)}
    return found | {"wgrad": backend.wgrad(gradient, forward, None)}
