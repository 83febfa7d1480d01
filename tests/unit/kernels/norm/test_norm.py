"""A norm that is quantized as it is computed has the bits of norm and quantizer one after the other, in Triton's interpreter."""

import pytest
import torch
from support.fp8_reference import same_bits, uneven
from support.kernel_tests import in_interpreter

from megatron_rl.kernels.norm import reference
from megatron_rl.kernels.norm.reference import normalize
from parallel.formats import BLOCK

EPS = 1e-6


def cut(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round as the interpreter does: towards zero."""
    return (values.view(torch.int32) & -0x10000).view(torch.float32).to(dtype) if dtype is torch.bfloat16 else values


@in_interpreter
def test_bytes_and_scales_match_two_separate_kernels_and_may_be_padded():
    from megatron_rl.kernels.norm.triton import quantize_norm
    from megatron_rl.kernels.quantize.triton import quantize_activation

    for scale_format, dtype, tokens, width, adds in (
        ("pow2", torch.float32, 130, 256, True), ("fp32", torch.bfloat16, 3, 384, True), ("pow2", torch.bfloat16, 20, 128, False),
        ("fp32", torch.float32, 0, 256, True),
    ):  # fmt: skip
        x, residual = (uneven(tokens, width, dtype) for _ in range(2))
        weight = torch.linspace(-2, 3, width).to(dtype)
        residual = residual.flip(0) if adds else None
        total, statistic, rows, columns = quantize_norm(x, residual, weight, EPS, scale_format, columns=True)
        assert torch.equal(total, cut(x.float() + residual.float(), dtype) if residual is not None else x)
        wanted = torch.rsqrt(total.float().square().mean(-1) + EPS)
        assert torch.allclose(statistic, wanted, rtol=1e-6)
        normed = cut(total.float() * statistic[:, None] * weight.float(), dtype)
        expected = quantize_activation(normed, scale_format, rows=True, columns=True)
        for pair, other in zip((rows, columns), expected, strict=True):
            assert same_bits(pair, other) and [each.stride() for each in pair] == [each.stride() for each in other]
        if tokens < BLOCK:
            result = torch.empty_like(x)  # as in an engine
            alone = quantize_norm(x, residual, weight, EPS, scale_format, columns=False, result=result)
            assert alone[3] is None and same_bits(alone[2], rows) and torch.equal(result, normed)
    # for Transformer Engine, rows and columns are padded with zeros to multiples of 16
    x, weight = uneven(131, 128, torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    *_, plain_rows, plain_columns = quantize_norm(x, x, weight, EPS, "pow2", columns=True)
    *_, rows, columns = quantize_norm(x, x, weight, EPS, "pow2", columns=True, row_multiple=16, column_multiple=16)
    assert rows[0].shape == (144, 128) and rows[1].t().is_contiguous() and columns[0].shape == (128, 144)
    assert same_bits((rows[0][:131], rows[1][:131]), plain_rows) and not rows[0][131:].view(torch.uint8).any()
    assert same_bits((columns[0], columns[1]), (plain_columns[0][:, :144], plain_columns[1]))


@in_interpreter
def test_the_kernel_without_quantization_reads_heads_of_a_projection_in_place():
    """The norm, its gradient, and the sum before it have the bits of contiguous rows, and the values of the reference."""
    from megatron_rl.kernels.norm import triton as kernels

    draw, near = torch.Generator().manual_seed(0), {"rtol": 2**-6, "atol": 4e-2}  # the interpreter truncates twice
    for dtype, heads, width in ((torch.float32, 3, 40), (torch.bfloat16, 2, 64), (torch.bfloat16, 1, 2048)):
        fused = torch.randn(5, 1, heads + 2, width, generator=draw).to(dtype)
        x, residual, dy = fused[:, :, 1:-1], *(torch.randn(5, 1, heads, width, generator=draw).to(dtype) for _ in range(2))
        scale = torch.linspace(-1, 2, width)
        for adds in (None, residual):
            found, alone = (kernels.normalize(each, adds, scale, EPS) for each in (x, x.clone()))
            assert torch.equal(found[0], x if adds is None else cut(x.float() + adds.float(), dtype))
            wanted = reference.normalize(found[0], None, scale, EPS)
            gradients = [
                functions.differentiate(dy, each[0], each[1], scale, adds)
                for functions, each in ((kernels, found), (kernels, alone), (reference, wanted))
            ]
            assert found[0].data_ptr() == x.data_ptr() or adds is not None, "without a sum, the input is not copied"
            for own, other, exact in zip((*found, *gradients[0]), (*alone, *gradients[1]), (*wanted, *gradients[2]), strict=True):
                assert own.dtype == exact.dtype and own.shape == exact.shape and torch.equal(own, other)
                assert torch.allclose(own.float(), exact.float(), **(near if dtype is torch.bfloat16 else {"atol": 1e-5}))
    for few in (slice(1), slice(2, 5)):
        assert torch.equal(kernels.normalize(x[few], None, scale, EPS)[2], kernels.normalize(x, None, scale, EPS)[2][few])
    assert kernels.normalize(x[:0], residual[:0], scale, EPS)[2].shape == (0, 1, 1, 2048)
    with pytest.raises(ValueError, match="must match x"):
        kernels.normalize(x, residual[:2], scale, EPS)


@in_interpreter
def test_the_kernels_gradients_are_the_references():
    from megatron_rl.kernels.norm.triton import differentiate

    for dtype, tokens, adds in (
        (torch.float32, 35, True),
        (torch.bfloat16, 16, False),
        (torch.bfloat16, 3, True),
        (torch.float32, 0, True),
    ):
        draw = torch.Generator().manual_seed(tokens)
        total, dy, of_total = (torch.randn(tokens, 96, generator=draw).to(dtype) for _ in range(3))
        statistic, weight = torch.rsqrt(total.float().square().mean(-1) + EPS), torch.linspace(-1, 2, 96).to(dtype)
        given = dy, total, statistic, weight, of_total if adds else None
        near = {"rtol": 2**-6, "atol": 1e-2} if dtype is torch.bfloat16 else {"atol": 1e-5}
        for found, wanted in zip(differentiate(*given), reference.differentiate(*given), strict=True):
            assert found.dtype == wanted.dtype and torch.allclose(found.float(), wanted.float(), **near)


def test_the_gradient_is_autograds():
    draw = torch.Generator().manual_seed(0)
    x, residual, dy, of_total = (torch.randn(5, 24, generator=draw) for _ in range(4))
    weight = torch.randn(24, generator=draw).requires_grad_()
    x.requires_grad_()
    total, statistic, normed = normalize(x, residual, weight, EPS)
    assert torch.allclose(normed, torch.nn.functional.rms_norm(x + residual, (24,), weight, EPS), atol=1e-6)
    wanted = torch.autograd.grad((total, normed), (x, weight), (of_total, dy))
    found = reference.differentiate(dy, total.detach(), statistic.detach(), weight.detach(), of_total)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, wanted, strict=True))


@in_interpreter
def test_shapes_that_do_not_fit_are_refused():
    from megatron_rl.kernels.norm.triton import quantize_norm

    for width, residual, weight in ((200, None, 200), (256, (3, 256), 256), (256, None, 128)):
        with pytest.raises(ValueError, match="multiple of 128"):
            quantize_norm(torch.zeros(4, width), residual and torch.zeros(residual), torch.ones(weight), EPS, "pow2", columns=True)
