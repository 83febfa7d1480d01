"""SwiGLU in one pass: rounding, gradients, and the kernels, plain and quantizing, in Triton's interpreter."""

import re

import pytest
import torch
import torch.nn.functional as F
from support.fp8_reference import same_bits, uneven
from support.kernel_tests import call_with_triton, compile_for_hopper, ignore_marks, in_interpreter, needs_triton, random

from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.kernels.swiglu import reference
from megatron_rl.kernels.swiglu.reference import swiglu


def by_torch(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (3 * random(*shape, seed=0)).to(dtype)


def test_swiglu_is_rounded_once_saves_only_its_input_and_has_the_gradients_of_autograd():
    x = (3 * random(33, 1, 96, seed=0)).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = swiglu(x)
    exact = by_torch(x.detach().double())
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-30).all()
    assert ((by_torch(x.detach()).double() - exact).abs() > exact.abs() * 2**-8 * 1.001).any(), "torch's two operators round twice"
    assert len(saved) == 1 and saved[0].data_ptr() == x.data_ptr()
    assert swiglu(torch.tensor([-200.0, 200.0, 1.0, 1.0])).tolist() == [0.0, 200.0]
    x = (3 * random(7, 64, seed=0)).requires_grad_()
    dy = 3 * random(7, 32, seed=1)
    (wanted,) = torch.autograd.grad(by_torch(x), x, dy)
    (found,) = torch.autograd.grad(swiglu(x), x, dy)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@in_interpreter
def test_the_kernels_results_are_the_references():
    """Up to the last bit: the interpreter truncates to BF16."""
    from megatron_rl.kernels.swiglu.triton import differentiate, multiply

    for width in (96, 1024, 1100):
        for dtype in (torch.float32, torch.bfloat16):
            x, dy = ((3 * random(3, 1, count * width, seed=count)).to(dtype) for count in (2, 1))
            bound = {"rtol": 1e-5 if dtype is torch.float32 else 2**-7, "atol": 1e-4}
            assert torch.allclose(multiply(x).float(), reference.multiply(x).float(), **bound)
            assert torch.allclose(differentiate(x, dy).float(), reference.differentiate(x, dy).float(), **bound)
    assert multiply(torch.empty(0, 64)).shape == (0, 32)


@in_interpreter
def test_an_engines_kernel_writes_the_result_and_its_quantized_rows():
    from megatron_rl.kernels.quantize.triton import quantize_activation
    from megatron_rl.kernels.swiglu.triton import multiply, multiply_and_quantize

    for scale_format, tokens, width in (("pow2", 3, 1152), ("fp32", 5, 128), ("pow2", 0, 256)):
        x = uneven(tokens, 2 * width, torch.bfloat16).clamp(-80, 80)
        result, rows = multiply_and_quantize(x, scale_format)
        wanted, _ = quantize_activation(multiply(x), scale_format, rows=True, columns=False)
        assert torch.equal(result, multiply(x)) and same_bits(rows, wanted) and rows[1].stride() == wanted[1].stride()


@pytest.mark.kernels
@in_interpreter
def test_bytes_and_scales_match_two_separate_kernels_and_may_be_padded():
    from megatron_rl.kernels.quantize.triton import quantize_activation
    from megatron_rl.kernels.swiglu.triton import differentiate, multiply, quantize_swiglu

    for scale_format, dtype, tokens, width, counts in (
        ("pow2", torch.float32, 130, 128, None), ("fp32", torch.bfloat16, 3, 256, None), ("fp32", torch.float32, 0, 128, None),
        ("pow2", torch.bfloat16, 384, 128, [128, 0, 256]),
    ):  # fmt: skip
        gate_up, dy = uneven(tokens, 2 * width, torch.float32), uneven(tokens, width, dtype)
        gate_up[:, :width] = gate_up[:, :width].clamp(-80, 80)  # exp of more overflows
        gate_up, groups = gate_up.to(dtype), None if counts is None else TokenGroups.from_counts(counts, "cpu")
        for gradient in (None, dy):
            plain = multiply(gate_up) if gradient is None else differentiate(gate_up, gradient)
            for rows, columns, by_token in ((True, True, False), (gradient is None, gradient is not None, groups is not None)):
                asked = {"rows": rows, "columns": columns or by_token, "groups": groups, "by_token": by_token}
                found = quantize_swiglu(gate_up, gradient, scale_format, **asked)
                for pair, wanted in zip(found, quantize_activation(plain, scale_format, **asked), strict=True):
                    assert (pair is None) == (wanted is None)
                    if pair is not None and wanted is not None:
                        assert same_bits(pair, wanted) and [each.stride() for each in pair] == [each.stride() for each in wanted]
    # for Transformer Engine, rows and columns are padded with zeros to multiples of 16
    gate_up, dy = uneven(131, 256, torch.bfloat16).clamp(-80, 80), uneven(131, 128, torch.bfloat16)
    for gradient, width in ((None, 128), (dy, 256)):
        wanted = quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=True)
        rows, columns = quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=True, row_multiple=16, column_multiple=16)
        assert rows[0].shape == (144, width) and rows[1].t().is_contiguous() and columns[0].shape == (width, 144)
        assert same_bits((rows[0][:131], rows[1][:131]), wanted[0]) and not rows[0][131:].view(torch.uint8).any()
        assert same_bits((columns[0], columns[1]), (wanted[1][0][:, :144], wanted[1][1]))


def compile_variants() -> list[tuple[str, str]]:
    """Return (PTX, report of the assembler) of the kernel forward and backward."""
    from megatron_rl.kernels.swiglu.triton import LAUNCH, quantize_swiglu_tile

    types = {"gate_up": "*bf16", "gradient": "*bf16", "row_data": "*u8", "column_data": "*u8", "row_scale": "*fp32"}
    types |= {"column_scale": "*fp32", "group_start": "*i64", "group_length": "*i64"}
    compiled = []
    for backward, pow2 in ((False, True), (True, True), (True, False)):
        fixed = dict(POW2=pow2, ROWS=True, COLUMNS=True, BACKWARD=backward, GROUPED=False, BY_TOKEN=False)
        fixed |= {"EPSILON": 1e-10, "LARGEST": 448.0, "TILE": 128, "TOKENS": 128, "AGAIN": False}
        compiled.append(compile_for_hopper(quantize_swiglu_tile, LAUNCH | {"num_warps": 8}, types, fixed, ("width", "column_tokens")))
    return compiled


@pytest.mark.kernels
@needs_triton
def test_it_compiles_for_hopper_and_rounds_as_two_kernels_do():
    """The values are rounded to BF16 before they are quantized."""
    for ptx, report in call_with_triton(compile_variants):
        assert not re.search("fma.rn.f32|div[.]full", ignore_marks(ptx)) and re.search(r"cvt\.rn(\.bf16x2|\.bf16)\.f32", ptx)
        assert "st.global.v4" in ptx and "st.global.b8" not in ptx, "stores byte by byte"
        assert " 0 bytes spill stores" in report, report


def find_spills_on_blackwell() -> list[tuple[int, str]]:
    """Return (warps, spilled registers) of two forms of the gradient whose columns are not transposed."""
    from unittest.mock import patch

    import compile_kernels
    from triton.runtime.jit import JITFunction

    from megatron_rl.kernels import blackwell

    plain = blackwell.is_blackwell
    with patch.object(JITFunction, "__getitem__", JITFunction.__getitem__), patch.object(blackwell, "is_blackwell", plain):
        compiled = compile_kernels.intercept_launches(100)
        from megatron_rl.kernels.swiglu.triton import quantize_swiglu

        gate_up, groups = torch.zeros(256, 512, dtype=torch.bfloat16), TokenGroups.from_counts([128, 128], "cpu")
        gradient = gate_up[:, :256].contiguous()
        quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=False)
        quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=True, groups=groups, by_token=True)
    return [(kernel.metadata.num_warps, compile_kernels.find_spill(kernel, 100)) for kernel in compiled["quantize_swiglu_tile"]]


@pytest.mark.kernels
@needs_triton
def test_gradients_that_are_not_transposed_fit_in_the_registers_of_blackwell():
    assert call_with_triton(find_spills_on_blackwell) == [(8, "")] * 2


@in_interpreter
def test_widths_and_gradients_that_do_not_fit_are_refused():
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu

    for width, gradient in ((384, None), (256, torch.zeros(4, 256)), (256, torch.zeros(3, 128))):
        with pytest.raises(ValueError, match="multiples of 128"):
            quantize_swiglu(torch.zeros(4, width), gradient, "pow2", rows=True, columns=True)
