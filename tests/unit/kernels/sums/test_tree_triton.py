"""The Triton kernel that multiplies by the tree gives the reference's sums, in Triton's interpreter here, and compiles for Hopper."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes import call_in_fresh_process
from support.tree_sums import check_kernel

from parallel.row_sums import halve, list_merges

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec: SGLang's stub modules answer that
needs_triton = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")


@given(st.integers(1, 400))
def test_leaves_one_after_the_other_build_the_tree(leaves):
    """With a place for each level, as the kernel has."""

    def build(first: int, count: int) -> object:
        return first if count == 1 else (build(first, halve(count)), build(first + halve(count), count - halve(count)))

    levels = (leaves - 1).bit_length()
    waiting: dict[int, object] = {}
    for leaf, (level, completed) in enumerate(list_merges(leaves)):
        node: object = leaf
        assert level in (0, 1) or leaves == 1
        for at in range(level, completed):
            node = waiting.pop(at), node
        assert completed not in waiting
        waiting[completed] = node
    assert waiting == {levels: build(0, leaves)}
    assert list_merges(2 * leaves)[:leaves] == list_merges(leaves), "programs that share a tree read one table"


def compare_with_the_reference() -> None:
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        """The interpreter keeps BF16 numbers as integers, and multiplies these."""
        if a.dtype == tl.bfloat16:
            wide = [(operand.data.astype(numpy.uint32) << 16).view(numpy.float32) for operand in (a, b)]
            a, b = (interpreter.TensorHandle(data, tl.float32) for data in wide)
        return multiply(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    for leaves in (*range(1, 10), 22):
        check_kernel(5, 130, leaves * 128, "cpu", torch.float8_e4m3fn)
    for width in (128, 384, 576, 96, 3072):  # also without a whole last leaf
        check_kernel(67, 33, width, "cpu", torch.bfloat16)
    check_kernel(130, 70, 7 * 128, "cpu", torch.float32)
    check_kernel(0, 128, 256, "cpu", torch.float32)


def compile_for_hopper() -> list[tuple[str, str]]:
    """(PTX, the assembler's report) of the kernel for FP8 and BF16, as deep as 32B models' widest sums at tp 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from megatron_rl.kernels.sums.triton import GROUP, LAUNCH, TILE
    from megatron_rl.kernels.sums.triton import multiply_tile as kernel

    names, compiled = kernel.arg_names, []
    for dtype, levels in (("fp8e4nv", 8), ("bf16", 8)):
        pointers = {
            "x": f"*{dtype}",
            "weight": f"*{dtype}",
            "result": "*fp32",
            "x_scale": "*fp32",
            "weight_scale": "*fp32",
            "merges": "*i32",
        }
        fixed = dict(SCALED=dtype != "bf16", WHOLE=True, LEVELS=levels, TILE=TILE, GROUP=GROUP, LEAF=128, BLOCK=128)
        signature = {name: pointers.get(name, "constexpr" if name in fixed else "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in (*pointers, "features", "width")}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH).asm["ptx"]
        assembler = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-", "-o", os.devnull]
        report = subprocess.run(assembler, input=ptx, capture_output=True, text=True, check=True).stderr
        compiled.append((ptx, report))
    return compiled


@needs_triton
def test_the_kernels_sums_are_the_references():
    """`check_kernel` asserts. The interpreter is chosen when Triton is first imported."""
    call_in_fresh_process(compare_with_the_reference, TRITON_INTERPRET="1")


@needs_triton
def test_it_compiles_for_hopper(tmp_path):
    """Needs no GPU: Triton brings its own assembler."""
    for (ptx, report), kind in zip(
        call_in_fresh_process(compile_for_hopper, TRITON_CACHE_DIR=str(tmp_path)), ("e4m3", "bf16"), strict=True
    ):
        assert f"m64n32k{32 if kind == 'e4m3' else 16}.f32.{kind}" in ptx, "not the tensor cores of Hopper"
        assert "cp.async.cg" in ptx, "waits for its operands"
        assert "fma.rn" not in ptx, "a leaf is added unrounded"
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report


@needs_triton
def test_other_operands_are_refused():
    from megatron_rl.kernels.sums.triton import multiply_nodes

    data, scale = torch.zeros(128, 256, dtype=torch.float8_e4m3fn), torch.ones(128, 2)
    for operands in (
        (torch.zeros(2, 256), torch.zeros(128, 256).bfloat16()),
        (torch.zeros(2, 256).half(), torch.zeros(128, 256).half()),
        (data, data),
        (data, data, scale, scale),
        (data[:, :200].contiguous(), data[:, :200].contiguous(), scale, scale[:1]),
        (torch.zeros(2, 128), torch.zeros(128, 256)[:, :128]),
    ):
        with pytest.raises(ValueError, match="the tree kernel does not support"):
            multiply_nodes(*operands)
