"""Sums by the tree: the same bits for any number of ranks, and the Triton kernel in Triton's interpreter and compiled for Hopper."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_tests import call_with_triton, compile_for_hopper, in_interpreter, needs_triton, random
from support.tree_sums import check_kernel

from megatron_rl.kernels.linear.reference import fprop_by_tree
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import round_trip_1x128
from parallel.row_sums import LEAF, halve, holds_node, list_merges


def cut(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [part.contiguous() for part in x.chunk(ranks, -1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaves, columns", [(2, 33), (6, 300), (8, 576), (24, 128)])
def test_every_number_of_ranks_and_rows_gives_the_same_bits(leaves, columns, dtype):
    x, weight = random(530, leaves * LEAF, seed=0).to(dtype), random(columns, leaves * LEAF, seed=1).to(dtype)
    whole = tree.multiply(x, weight)
    torch.testing.assert_close(whole, (x.double() @ weight.double().t()).float(), rtol=1e-4, atol=1e-3)
    for rows in (1, 15, 40, 530):
        for ranks in (1, 2, 4, 8):
            if holds_node(leaves * LEAF, ranks):
                parts = [tree.multiply(part[:rows], own) for part, own in zip(cut(x, ranks), cut(weight, ranks), strict=True)]
                assert torch.equal(tree.add(parts), whole[:rows]), (rows, ranks)


def test_quantized_inputs_too_and_a_sum_of_few_numbers_is_one_leaf():
    x, weight = random(20, 4 * LEAF, seed=0), random(64, 4 * LEAF, seed=1).to(torch.bfloat16).float()
    whole = fprop_by_tree(x, weight, "pow2")
    assert torch.equal(fprop_by_tree(x, weight.bfloat16(), "pow2"), whole)  # as an engine keeps values
    torch.testing.assert_close(whole, round_trip_1x128(x, "pow2") @ weight.t(), rtol=1e-4, atol=1e-3)
    assert torch.equal(tree.add([fprop_by_tree(*parts, "pow2") for parts in zip(cut(x, 4), cut(weight, 4), strict=True)]), whole)
    x, weight = random(16, 96, seed=0), random(40, 96, seed=1)
    assert torch.equal(tree.multiply(x, weight), x @ weight.t())
    assert not holds_node(96, 1) and not holds_node(3 * LEAF, 2) and not holds_node(3 * LEAF, 3) and holds_node(4 * LEAF, 4)


@given(st.integers(1, 12), st.integers(0, 3))
def test_a_node_adds_its_halves(leaves, power):
    """Powers of two beyond FP32's precision, so that another order gives another sum."""
    values = (2.0 ** random(leaves * 2**power, seed=leaves).mul(12).round()).float()

    def add(part: list[float]) -> torch.Tensor:
        middle = halve(len(part))
        return torch.tensor(part[0]) if len(part) == 1 else add(part[:middle]) + add(part[middle:])

    parts = [tree.add(list(part)) for part in values.chunk(2**power)]
    assert tree.add(parts) == add(values.tolist())


@pytest.mark.parametrize("vocabulary", [151936 // 16, 4096, 1001])
def test_log_softmax_of_a_vocabulary_that_ranks_share(vocabulary):
    logits = random(9, vocabulary, seed=3) * 4
    logits[4, ::3] = -torch.inf
    whole = tree.log_softmax(logits)
    torch.testing.assert_close(whole, F.log_softmax(logits, -1))
    assert all(torch.equal(tree.log_softmax(logits[row : row + 1]), whole[row : row + 1]) for row in range(9))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    for ranks in (1, 2, 4, 8):
        if vocabulary % ranks == 0:
            sums = [tree.sum_vocabulary(part, vocabulary) for part in cut(weights, ranks)]
            assert torch.equal(tree.add(sums), tree.sum_vocabulary(weights, vocabulary))


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


@pytest.mark.kernels
@in_interpreter
def test_the_kernels_sums_are_the_references():
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        for leaves in (*range(1, 10), 22):
            check_kernel(5, 130, leaves * 128, "cpu", torch.float8_e4m3fn)
        for width in (128, 384, 576, 96, 3072):  # also without a whole last leaf
            check_kernel(67, 33, width, "cpu", torch.bfloat16)
        check_kernel(130, 70, 7 * 128, "cpu", torch.float32)
        check_kernel(0, 128, 256, "cpu", torch.float32)


def compile_variants() -> list[tuple[str, str]]:
    """Return (PTX, report of the assembler) of the kernel for FP8 and BF16, with the depth of the widest sums of 32B models at tp 1."""
    from megatron_rl.kernels.sums.triton import GROUP, LAUNCH, TILE, multiply_tile

    compiled = []
    for dtype in ("fp8e4nv", "bf16"):
        types = dict.fromkeys(("x", "weight"), f"*{dtype}") | dict.fromkeys(("result", "x_scale", "weight_scale"), "*fp32")
        fixed = dict(SCALED=dtype != "bf16", WHOLE=True, LEVELS=8, TILE=TILE, GROUP=GROUP, LEAF=128, BLOCK=128)
        compiled.append(compile_for_hopper(multiply_tile, LAUNCH, types | {"merges": "*i32"}, fixed, ("features", "width")))
    return compiled


@needs_triton
def test_it_compiles_for_hopper():
    for (ptx, report), kind in zip(call_with_triton(compile_variants), ("e4m3", "bf16"), strict=True):
        assert f"m64n32k{32 if kind == 'e4m3' else 16}.f32.{kind}" in ptx, "not the tensor cores of Hopper"
        assert "cp.async.cg" in ptx, "waits for its operands"
        assert "fma.rn" not in ptx, "a leaf is added unrounded"
        assert "0 bytes spill stores, 0 bytes spill loads" in report, report


@in_interpreter
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
