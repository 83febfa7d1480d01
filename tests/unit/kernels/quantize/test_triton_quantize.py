"""The Triton kernel that quantises activations gives the reference's bytes and scales. It runs in Triton's interpreter here."""

from __future__ import annotations

import importlib.machinery
import itertools
import re

import pytest
import torch
from support.fp8_reference import check_into, check_kernel, uneven
from support.processes import call_in_fresh_process

from megatron_rl.kernels.experts.token_groups import TokenGroups

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec: SGLang's stub modules answer that
pytestmark = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")


def compare_with_the_reference() -> None:
    shapes = (128, 128), (130, 256), (3, 128), (256, 384)
    for scale_format, dtype, (tokens, width) in itertools.product(("pow2", "fp32"), (torch.float32, torch.bfloat16), shapes):
        check_kernel(uneven(tokens, width, dtype), scale_format)
        check_into(uneven(tokens, width, dtype), scale_format)
    for scale_format in ("pow2", "fp32"):
        check_kernel(torch.zeros(130, 128), scale_format)
        check_kernel(uneven(640, 128, torch.bfloat16), scale_format, groups=[128, 0, 384, 128])
        check_kernel(torch.empty(0, 128), scale_format)


def compile_for_hopper() -> list[str]:
    """PTX of three variants of the kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_rl.kernels.quantize.triton import LAUNCH
    from megatron_rl.kernels.quantize.triton import quantize_tile as kernel

    pointers = {"x": "*bf16", "row_data": "*u8", "column_data": "*u8", "sources": "*i32", "group_start": "*i64", "group_length": "*i64"}
    pointers |= {"row_scale": "*fp32", "column_scale": "*fp32"}
    sizes = dict.fromkeys(("tokens", "padded_tokens", "width", "row_scale_stride", "row_scale_step"), "i32")
    names, compiled = kernel.arg_names, []
    for pow2, columns, grouped in ((True, True, False), (False, True, True), (True, False, False)):
        fixed = dict(POW2=pow2, ROWS=True, COLUMNS=columns, GROUPED=grouped, EPSILON=1e-10, LARGEST=448.0, TILE=128)
        signature = {name: ({**pointers, **sizes}).get(name, "constexpr") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in (*pointers, "width", "padded_tokens")}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
        compiled.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH).asm["ptx"])
    return compiled


def test_bytes_and_scales_are_the_references():
    """`check_kernel` and `check_into` assert. The interpreter is chosen when Triton is first imported."""
    call_in_fresh_process(compare_with_the_reference, TRITON_INTERPRET="1")


def test_it_compiles_for_hopper_with_the_references_rounding(tmp_path):
    """Needs no GPU: Triton brings its own assembler."""
    for ptx in call_in_fresh_process(compile_for_hopper, TRITON_CACHE_DIR=str(tmp_path)):
        assert not re.search("fma|div[.](approx|full)", ptx), "not rounded as the reference"
        assert "st.global.v4" in ptx and "st.global.b8" not in ptx, "stores byte by byte"


def test_other_widths_and_groups_are_refused():
    from megatron_rl.kernels.quantize.triton import quantize_activation

    for shape, groups in (((128, 100), None), ((256, 128), TokenGroups.from_counts([100], "cpu"))):
        with pytest.raises(ValueError, match="multiple of 128"):
            quantize_activation(torch.zeros(shape), "pow2", rows=True, columns=True, groups=groups)
