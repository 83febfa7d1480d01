"""Kernels that quantize, compiled for Hopper, stay within a number of instructions per value and of registers, and spill none."""

import compile_kernels
import kernel_counts
import pytest
from support.kernel_tests import call_with_triton, needs_triton

LIMITS = {  # instructions per value, registers
    "both ways, pow2: quantize_tile": (15, 168),
    "rows, pow2: quantize_tile": (9, 40),
    "columns, pow2: quantize_tile": (10, 168),
    "SwiGLU, both ways: quantize_swiglu_tile": (47, 128),
    "SwiGLU, rows: quantize_swiglu_tile": (44, 64),
    "SwiGLU's gradient, both ways: quantize_swiglu_tile": (36, 232),
    "SwiGLU's gradient, rows: quantize_swiglu_tile": (31, 120),
    "norm: normalize_row": (27, 32),
    "norm: quantize_normed_tile": (15, 168),
}


def count_all():
    return {name: tuple(each) for name, each in kernel_counts.count_all(compile_kernels.intercept_launches(90)).items()}


@pytest.mark.kernels
@needs_triton
def test_kernels_that_quantize_take_few_instructions_and_spill_none():
    counts = call_with_triton(count_all, alone=True)
    for name, (per_value, _, registers, spilled, _) in counts.items():
        most, most_registers = LIMITS.get(name, (21, 255))
        assert per_value <= most and registers <= most_registers and not spilled, (name, per_value, registers, spilled)
    assert set(LIMITS) <= set(counts)
