"""Each back end on a Hopper GPU against `emulated` on the same operands: quantized bytes equal, products equal but for FP32 sums."""

import itertools

import pytest
import torch
from support.fp8_reference import check_columns, check_kernel, check_rows, quantize_128x1, uneven

from megatron_rl.kernels.experts.deep_gemm import DeepGemmExperts
from megatron_rl.kernels.experts.reference import collect
from megatron_rl.kernels.linear import make_backend, requirements
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.fp8 import quantize_1x128, quantize_weight
from parallel.formats import FP8

SHAPES = {  # tokens, N, K
    "cuda": ((256, 512, 384), (1, 256, 512), (1000, 1536, 2048), (4096, 4096, 7168), (1000, 576, 7168)),
    "cpu": ((64, 256, 128), (1, 256, 128), (130, 128, 256), (3, 384, 128)),
}
BOUND = 2**-8
"""Of a product's error, relative to the sum of the terms' sizes: a tensor core instruction of Hopper aligns 32 FP8 products to the largest
and drops what lies below 2^-13 of it, 2^-8 in all at worst; all else is FP32. A bf16 result is rounded once more, by 2^-8 of itself."""


@pytest.fixture(params=["pow2", "fp32"])
def scale_format(request):
    return request.param


def with_zeros(*shape_and_place):
    """Return uneven values, the first of which are blocks of zeros."""
    x = uneven(*shape_and_place)
    x[: len(x) // 4] = 0.0
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_activation_kernel_gives_the_references_bytes(scale_format, dtype):
    for tokens, width in ((1, 128), (3, 384), (128, 128), (1000, 2048)):
        check_kernel(with_zeros(tokens, width, dtype, "cuda"), scale_format)
    check_kernel(uneven(640, 256, dtype, "cuda"), scale_format, groups=[128, 0, 384, 128])


def test_operands_are_the_references(device, backends, scale_format, subtests):
    for name, (tokens, width) in itertools.product(backends, ((16, 128), (1000, 2048))):
        with subtests.test(backend=name, tokens=tokens):
            x = with_zeros(tokens, width, torch.bfloat16, device)
            operand = make_backend(name, FP8.with_scales(scale_format)).quantize(x, rows=True, columns=True)
            if name == "deep_gemm":
                check_rows(operand.rows, x, scale_format)
                check_columns(operand.columns, x, scale_format)
                continue
            data, scale = quantize_1x128(x, scale_format)
            assert torch.equal(operand.rows[0][:tokens], data.view(torch.uint8)) and torch.equal(operand.rows[1][:, :tokens], scale.t())
            data, scale = quantize_128x1(x, scale_format)
            assert torch.equal(operand.columns[0][:, :tokens], data.view(torch.uint8).t())
            assert torch.equal(operand.columns[1][:, :width], scale)


@pytest.mark.parametrize("number", range(4))
def test_products_are_within_the_tensor_cores_rounding(device, backends, scale_format, number, subtests, record_property):
    """Against `emulated`; a wrong scale or a swapped block is far outside. The report counts in how many bits back ends differ from each
    other: of DeepGEMM and cuBLAS, whether the engine's kernel is the trainer's."""
    tokens, n, k = SHAPES[device][number]
    x, dy = uneven(tokens, k, torch.bfloat16, device), uneven(tokens, n, torch.bfloat16, device)
    weight = quantize_weight(uneven(n, k, torch.float32, device), scale_format)
    computed = {}
    for name in backends:
        with subtests.test(backend=name):
            computed[name] = compute_products(make_backend(name, FP8.with_scales(scale_format)), weight, x, dy)
    if device == "cuda":
        with subtests.test(backend="sglang's Triton kernel"):
            computed["sglang's Triton kernel"] = {"fprop": compute_sglang_fprop(x, weight, scale_format)}
    errors = measure_errors(computed, weight, x, dy, scale_format)
    for (name, product), share in errors.items():
        record_property(f"{name} {product}, {scale_format}, T={tokens} N={n} K={k}: largest error as a share of the bound", share)
        with subtests.test(backend=name, product=product):
            assert share <= 1
    for (name, products), (other, other_products) in itertools.combinations(computed.items(), 2):
        for product in products.keys() & other_products.keys():
            count = int((products[product] != other_products[product]).sum())
            message = f"{count} of {products[product].numel()} values differ"
            record_property(f"{name} {product} against {other}, {scale_format}, T={tokens} N={n} K={k}", message)


def test_a_swapped_scale_is_outside_the_bound(monkeypatch):
    """The check itself, on a CPU: scales of `dy` and `x` in another order spoil two of three products."""
    emulated = make_backend("emulated", FP8.with_scales("pow2"))
    x, dy = uneven(64, 128, torch.bfloat16), uneven(64, 256, torch.bfloat16)
    weight = quantize_weight(uneven(256, 128, torch.float32), "pow2")
    computed = {"emulated": compute_products(emulated, weight, x, dy), "swapped": compute_products(emulated, weight, x.flip(0), dy.flip(0))}
    errors = measure_errors(computed, weight, x, dy, "pow2")
    assert {case for case, share in errors.items() if share > 1} == {("swapped", "fprop"), ("swapped", "dgrad")}


def measure_errors(computed, weight, x, dy, scale_format):
    """Return for (back end, product) the largest error as a share of what is allowed where it is."""
    emulated = make_backend("emulated", FP8.with_scales(scale_format))
    exact = compute_products(emulated, weight, x.float(), dy.float())
    positive = weight._replace(data=weight.data.float().abs().to(weight.data.dtype))
    sizes = compute_products(emulated, positive, x.float().abs(), dy.float().abs())
    shares = {}
    for name, products in computed.items():
        for product, values in products.items():
            bound = BOUND * (sizes[product] + (exact[product].abs() if values.dtype == torch.bfloat16 else 0))
            error = (values.float() - exact[product]).abs()
            shares[name, product] = float(error.div(bound.clamp_min(1e-30)).nan_to_num(nan=torch.inf).max())
    return shares


def compute_sglang_fprop(x, weight, scale_format):
    """Return what the engine computes where DeepGEMM is not installed."""
    kernel = pytest.importorskip("sglang.kernels.ops.gemm.fp8_kernel")
    data, scale = quantize_1x128(x, scale_format)
    return kernel.w8a8_block_fp8_matmul_triton(data, weight.data, scale, weight.scale, [128, 128], torch.bfloat16)


def test_weight_gradients_are_added_in_place(device, backends, subtests):
    x, dy = (uneven(512, width, torch.bfloat16, device) for width in (256, 384))
    for name in backends:
        with subtests.test(backend=name):
            backend = make_backend(name, FP8.with_scales("pow2"))
            operands = backend.quantize(dy, rows=False, columns=True), backend.quantize(x, rows=False, columns=True)
            gradient = backend.wgrad(*operands, None)
            buffer = torch.ones_like(gradient)
            assert backend.wgrad(*operands, buffer) is buffer
            assert torch.allclose(buffer, 1 + gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()))
            assert torch.equal(gradient, backend.wgrad(*operands, None))  # the same sums in the same order


def test_grouped_products_are_those_of_each_expert(device, backends, scale_format):
    """The same sums within an expert, though tiles may differ: bf16 results may be neighbors, 2^-7 apart at most."""
    if "deep_gemm" not in backends:
        pytest.skip(f"deep_gemm: {requirements.find_missing('deep_gemm')}")
    counts, n, k = [130, 0, 3, 700], 512, 256
    groups = TokenGroups.from_counts(counts, device)
    grouped, single = DeepGemmExperts(FP8.with_scales(scale_format)), make_backend("deep_gemm", FP8.with_scales(scale_format))
    weights = [quantize_weight(uneven(n + 128 * e, k, torch.float32, device)[:n], scale_format) for e in range(len(counts))]
    x, dy = (uneven(sum(counts), width, torch.bfloat16, device) for width in (k, n))
    forward, gradient = (grouped.quantize(v, groups, rows=True, columns=True) for v in (x, dy))
    weight = grouped.prepare(weights)
    y, dx = (collect(z, groups.places) for z in (grouped.fprop(forward, weight, groups), grouped.dgrad(gradient, weight, groups)))
    dw = torch.zeros(len(counts), n, k, device=device)
    grouped.wgrad(gradient, forward, groups, dw.unbind())
    for expert, (xs, dys, ys, dxs) in enumerate(zip(*(v.split(counts) for v in (x, dy, y, dx)), strict=True)):
        expected = compute_products(single, weights[expert], xs, dys)
        assert torch.allclose(ys.float(), expected["fprop"].float(), rtol=2**-7)
        assert torch.allclose(dxs.float(), expected["dgrad"].float(), rtol=2**-7)
        assert torch.allclose(dw[expert], expected["wgrad"], rtol=1e-5, atol=1e-6 * float(expected["wgrad"].norm()))


def compute_products(backend, weight, x, dy):
    """Return all three products of x [T, K], dy [T, N] and a weight [N, K]."""
    prepared = backend.prepare(weight, None)
    forward, gradient = (backend.quantize(values, rows=True, columns=True) for values in (x, dy))
    return {
        "fprop": backend.fprop(forward, prepared),
        "dgrad": backend.dgrad(gradient, prepared),
        "wgrad": backend.wgrad(gradient, forward, None),
    }
