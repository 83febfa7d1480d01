"""SwiGLU that is quantized as it is computed has the bits of one kernel after the other, in Triton's interpreter."""

from __future__ import annotations

import importlib.machinery
import re

import pytest
import torch
from support.fp8_reference import same_bits, uneven
from support.processes import call_in_fresh_process

from megatron_rl.kernels.experts.token_groups import TokenGroups

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec: SGLang's stub modules answer that
pytestmark = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")


def compare_with_one_kernel_after_the_other() -> None:
    from megatron_rl.kernels.quantize.triton import quantize_activation
    from megatron_rl.kernels.swiglu.triton import differentiate, multiply, quantize_swiglu

    cases = ("pow2", torch.float32, 130, None), ("fp32", torch.bfloat16, 3, None), ("pow2", torch.bfloat16, 384, [128, 0, 256])
    for scale_format, dtype, tokens, counts in (*cases, ("fp32", torch.float32, 0, None)):
        gate_up, dy = uneven(tokens, 512, torch.float32), uneven(tokens, 256, dtype)
        gate_up[:, :256] = gate_up[:, :256].clamp(-80, 80)  # exp of more overflows
        gate_up, groups = gate_up.to(dtype), None if counts is None else TokenGroups.from_counts(counts, "cpu")
        for gradient in (None, dy):
            plain = multiply(gate_up) if gradient is None else differentiate(gate_up, gradient)
            for rows, columns in ((True, True), (gradient is None, gradient is not None)):
                asked = {"rows": rows, "columns": columns, "groups": groups}
                found = quantize_swiglu(gate_up, gradient, scale_format, **asked)
                for pair, wanted in zip(found, quantize_activation(plain, scale_format, **asked), strict=True):
                    assert (pair is None) == (wanted is None)
                    if pair is not None and wanted is not None:
                        assert same_bits(pair, wanted) and [each.stride() for each in pair] == [each.stride() for each in wanted]


def pad_as_transformer_engine() -> None:
    """Tokens in multiples of 16, of rows and of columns; padding is zero."""
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu

    gate_up, dy = uneven(131, 512, torch.bfloat16).clamp(-80, 80), uneven(131, 256, torch.bfloat16)
    for gradient, width in ((None, 256), (dy, 512)):
        wanted = quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=True)
        rows, columns = quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=True, row_multiple=16, column_multiple=16)
        assert rows[0].shape == (144, width) and rows[1].t().is_contiguous() and columns[0].shape == (width, 144)
        assert same_bits((rows[0][:131], rows[1][:131]), wanted[0]) and not rows[0][131:].view(torch.uint8).any()
        assert same_bits((columns[0], columns[1]), (wanted[1][0][:, :144], wanted[1][1]))


def compile_for_hopper() -> list[tuple[str, str]]:
    """(PTX, the assembler's report) of the kernel forward and backward."""
    import os
    import subprocess

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from megatron_rl.kernels.swiglu.triton import TILE_LAUNCH as LAUNCH
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu_tile as kernel

    types = {
        "gate_up": "*bf16",
        "gradient": "*bf16",
        "row_data": "*u8",
        "column_data": "*u8",
        "row_scale": "*fp32",
        "column_scale": "*fp32",
    }
    types |= {"group_start": "*i64", "group_length": "*i64"}
    names, compiled = kernel.arg_names, []
    for backward, pow2 in ((False, True), (True, True), (True, False)):
        fixed = dict(POW2=pow2, ROWS=True, COLUMNS=True, BACKWARD=backward, GROUPED=False, EPSILON=1e-10, LARGEST=448.0, TILE=128)
        signature = {name: types.get(name, "constexpr" if name in fixed else "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in (*types, "width", "column_tokens")}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH).asm["ptx"]
        assembler = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-", "-o", os.devnull]
        compiled.append((ptx, subprocess.run(assembler, input=ptx, capture_output=True, text=True, check=True).stderr))
    return compiled


def test_bytes_and_scales_are_those_of_two_kernels():
    call_in_fresh_process(compare_with_one_kernel_after_the_other, TRITON_INTERPRET="1")
    call_in_fresh_process(pad_as_transformer_engine, TRITON_INTERPRET="1")


def test_it_compiles_for_hopper_and_rounds_as_two_kernels_do(tmp_path):
    """Needs no GPU: Triton brings its own assembler. The BF16 that the second kernel would read is there."""
    for ptx, report in call_in_fresh_process(compile_for_hopper, TRITON_CACHE_DIR=str(tmp_path)):
        assert not re.search("fma.rn.f32|div[.]full", ptx) and re.search(r"cvt\.rn(\.bf16x2|\.bf16)\.f32", ptx)
        assert "st.global.v4" in ptx and "st.global.b8" not in ptx, "stores byte by byte"
        assert " 0 bytes spill stores" in report, report


def test_widths_and_gradients_that_do_not_fit_are_refused():
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu

    for gate_up, gradient in (
        (torch.zeros(4, 384), None),
        (torch.zeros(4, 256), torch.zeros(4, 256)),
        (torch.zeros(4, 256), torch.zeros(3, 128)),
    ):
        with pytest.raises(ValueError, match="multiples of 128"):
            quantize_swiglu(gate_up, gradient, "pow2", rows=True, columns=True)
