"""The Triton kernel that quantizes activations gives the bytes and scales of the reference, in Triton's interpreter."""

import itertools
import re

import pytest
import torch
from support.fp8_reference import check_kernel, engine_layouts, same_bits, uneven
from support.kernel_tests import call_with_triton, compile_for_hopper, ignore_marks, in_interpreter, needs_triton

from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.fp8 import quantize_1x128
from megatron_rl.precision.ue8m0 import pack_scales


@pytest.mark.kernels
@in_interpreter
def test_bytes_and_scales_are_the_references():
    from megatron_rl.kernels.quantize.triton import quantize_into

    formats, dtypes = ("pow2", "fp32"), (torch.float32, torch.bfloat16)
    cases = *itertools.product(formats, dtypes, [(130, 256)]), ("pow2", dtypes[0], (128, 128)), ("fp32", dtypes[1], (3, 384))
    for scale_format, dtype, (tokens, width) in cases:
        x = uneven(tokens, width, dtype)
        check_kernel(x, scale_format)
        for layout in engine_layouts(x):
            quantize_into(x, *layout, scale_format)
            assert same_bits(layout, quantize_1x128(x, scale_format))
    for tokens, width in ((130, 1024), (1, 128), (3, 640)):
        x, words = uneven(tokens, width, torch.bfloat16), -(-width // 512)
        packed = x.new_full((words, -(-tokens // 4) * 4), -1, dtype=torch.int32).t()[:tokens]
        data, (wanted, scale) = torch.empty_like(x, dtype=torch.float8_e4m3fn), quantize_1x128(x, "pow2")
        quantize_into(x, data, packed, "pow2")
        assert same_bits((data, packed), (wanted, pack_scales(scale, tokens)))
        with pytest.raises(ValueError, match="do not match"):
            quantize_into(x, data, packed, "fp32")
    for scale_format in formats:
        check_kernel(torch.zeros(130, 128), scale_format)
        check_kernel(uneven(384, 128, torch.bfloat16), scale_format, groups=[0, 256, 128])
        check_kernel(torch.empty(0, 128), scale_format)


@in_interpreter
def test_the_branch_for_the_hardware_has_the_same_bytes():
    from support.e4m3_casts import hardware_cast

    with hardware_cast():
        for scale_format in ("pow2", "fp32"):
            check_kernel(uneven(130, 256, torch.bfloat16), scale_format)
            check_kernel(uneven(384, 128, torch.bfloat16), scale_format, groups=[0, 256, 128])


def compile_variants() -> list[str]:
    """Return the PTX of four variants of the kernel."""
    from megatron_rl.kernels.quantize.triton import LAUNCH, quantize_tile

    types = {"x": "*bf16", "row_data": "*u8", "column_data": "*u8", "sources": "*i32", "group_start": "*i64", "group_length": "*i64"}
    types |= {"row_scale": "*fp32", "column_scale": "*fp32"}
    compiled = []
    variants = (True, True, False, False), (False, True, True, False), (True, True, True, True), (True, False, False, False)
    for pow2, columns, grouped, by_token in variants:
        fixed = dict(POW2=pow2, ROWS=True, COLUMNS=columns, GROUPED=grouped, PACKED=False, BY_TOKEN=by_token)
        fixed |= {"EPSILON": 1e-10, "LARGEST": 448.0, "TILE": 128, "TOKENS": 128 if columns else 32}
        compiled.append(compile_for_hopper(quantize_tile, LAUNCH, types, fixed, ("width", "padded_tokens"))[0])
    return compiled


@pytest.mark.kernels
@needs_triton
def test_it_compiles_for_hopper_with_the_references_rounding():
    for ptx in call_with_triton(compile_variants):
        assert not re.search("fma|div[.](approx|full)", ignore_marks(ptx)), "not rounded as the reference"
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "st.global.v4" in ptx and "st.global.b8" not in ptx, "stores byte by byte"


@in_interpreter
def test_other_widths_and_groups_are_refused():
    from megatron_rl.kernels.quantize.triton import quantize_activation

    for shape, groups in (((128, 100), None), ((256, 128), TokenGroups.from_counts([100], "cpu"))):
        with pytest.raises(ValueError, match="multiple of 128"):
            quantize_activation(torch.zeros(shape), "pow2", rows=True, columns=True, groups=groups)
