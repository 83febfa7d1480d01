"""Sums in the order of ranks: the same bits wherever the parts lie, and the Triton kernel in Triton's interpreter."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.kernel_tests import call_with_triton, compile_for_hopper, in_interpreter, needs_triton, random
from support.processes import World

from megatron_rl.kernels.batch_invariant import invariant_matmul
from megatron_rl.kernels.linear.reference import fprop
from megatron_rl.kernels.sums import ranks
from megatron_rl.kernels.sums import reference as tree

PARTS, WIDTH, COLUMNS = 8, 1024, 96


def make_operands(dtype):
    return random(37, WIDTH, seed=0).to(dtype), random(COLUMNS, WIDTH, seed=1).to(dtype)


PRODUCTS = {"bf16": invariant_matmul, "fp8": partial(fprop, scale_format="pow2")}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_depend_on_the_number_of_parts_alone(product, dtype):
    """Not on the number of ranks that share them, and not on other rows."""
    (x, weight), multiply = make_operands(dtype), PRODUCTS[product]
    whole = tree.add_ranks(ranks.multiply_slices(x, weight, PARTS, multiply))
    for size in (1, 2, 4, 8):
        shares = zip(ranks.cut(x, size), ranks.cut(weight, size), strict=True)
        partials = [ranks.multiply_slices(*share, PARTS // size, multiply) for share in shares]
        assert torch.equal(tree.add_ranks(torch.cat(partials)), whole), size
        for row in (0, 36):
            alone = torch.cat([each[:, row : row + 1] for each in partials])
            assert torch.equal(tree.add_ranks(alone), whole[row : row + 1])
            alone = ranks.multiply_slices(x[row : row + 1], weight, PARTS, multiply)
            assert torch.equal(tree.add_ranks(alone), whole[row : row + 1])
    others = {parts: tree.add_ranks(ranks.multiply_slices(x, weight, parts, multiply)) for parts in (1, 2, 4)}
    assert not any(torch.equal(other, whole) for other in others.values()), "the number of parts belongs to the bits"


def test_the_order_belongs_to_the_bits():
    """BF16 numbers of similar size nearly always have exact sums in FP32. Here, six of them vanish beside 1 and the half of its last place,
    but together they tip the rounding."""
    partials = torch.tensor([1.0, 2**-8, *[2**-25] * 6]).bfloat16().view(PARTS, 1, 1)
    assert tree.add_ranks(partials) == 1
    assert tree.add_ranks(partials.flip(0)) == tree.add(partials.float().unbind()).bfloat16() == 1 + 2**-7


def exchange(slices, rows):
    """Return on every rank of a world the sums by `reduce`, and those of its own rows by what `RankSum.start` does."""
    import torch.distributed as dist

    size, rank = dist.get_world_size(), dist.get_rank()
    partials = random(slices * size, rows, 80, seed=5, dtype=torch.bfloat16)[slices * rank : slices * (rank + 1)]
    sent = ranks.spread(partials[:, : rows - rows % size], size)
    dist.all_to_all_single(received := torch.empty_like(sent), sent)
    return ranks.reduce(partials, dist.group.WORLD), ranks.add_received(received)


def start_gloo():
    import torch.distributed as dist

    dist.init_process_group("gloo")


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_exchange_their_parts(size, tmp_path):
    with World(size, tmp_path) as world:
        world.call(start_gloo)
        for slices, rows in ((1, 301), (2, 3), (2, 301)):  # few results are gathered whole
            whole = tree.add_ranks(random(slices * size, rows, 80, seed=5, dtype=torch.bfloat16))
            for rank, (everywhere, own) in enumerate(world.call(exchange, slices, rows)):
                count = rows // size
                assert torch.equal(everywhere, whole) and torch.equal(own, whole[rank * count : (rank + 1) * count])


@in_interpreter
def test_the_kernel_adds_as_the_reference():
    from megatron_rl.kernels.sums import triton

    for dtype in (torch.bfloat16, torch.float32):
        for parts in (1, 2, 4, 8):
            for rows, columns in ((1, 1), (1, 1023), (1, 1024), (1, 1025), (7, 293), (16, 192)):  # up to three programs
                partials = random(parts, rows, columns, seed=parts).to(dtype)
                total = triton.add_ranks(partials)
                exact = tree.add_ranks(partials.float())
                if dtype == torch.bfloat16:  # to which the interpreter truncates
                    exact = (exact.view(torch.int32) & -0x10000).view(torch.float32).to(dtype)
                assert total.dtype == dtype and torch.equal(total, exact), (parts, rows, columns)
                assert torch.equal(triton.add_ranks(partials[:, -1:]), total[-1:]), "a row alone"
    assert triton.add_ranks(torch.zeros(2, 0, 64)).shape == (0, 64)


@in_interpreter
def test_the_kernel_adds_many_rows():
    from megatron_rl.kernels.sums import triton

    for rows, columns in ((0, 5), (1, 1), (300, 70), (128, 32)):
        numbers = random(rows, columns, seed=rows)
        assert torch.allclose(triton.add_rows(numbers, torch.float32), numbers.sum(0), atol=1e-4), (rows, columns)


def compile_adding():
    from megatron_rl.kernels.sums.triton import ADD_LAUNCH, ADDED, add_parts

    types = {"partials": "*bf16", "total": "*bf16"}
    return compile_for_hopper(add_parts, ADD_LAUNCH, types, {"ADDED": ADDED}, ())


@needs_triton
def test_it_compiles_for_hopper():
    ptx, report = call_with_triton(compile_adding)
    assert "cvt.rn.bf16" in ptx and "fma.rn" not in ptx and "0 bytes spill stores" in report, report


class Ordered:
    """SGLang's `CustomAllReduceV2`, which takes up to four rows."""

    disabled = False

    def should_custom_ar(self, x):
        return len(x) <= 4

    def custom_all_reduce(self, x):
        return x + 1


class OnGpu(torch.Tensor):
    is_cuda = True


def test_the_engine_sums_floats_in_the_order_of_ranks_or_not_at_all():
    from rollout_sglang.hooks import gpu_all_reduce

    def library(group, x):
        return "library"

    x = torch.zeros(11, 8, dtype=torch.bfloat16).as_subclass(OnGpu)
    group = SimpleNamespace(world_size=2, ca_comm=type("CustomAllReduceV2", (Ordered,), {})())
    assert torch.equal(gpu_all_reduce.all_reduce(library, group, x), torch.ones(11, 8, dtype=torch.bfloat16))
    assert gpu_all_reduce.all_reduce(library, group, x.int().as_subclass(OnGpu)) == "library", "integers have no order"
    for communicator in (None, Ordered(), type("CustomAllReduceV2", (Ordered,), {"disabled": True})()):
        with pytest.raises(NotImplementedError, match="'ranks' needs SGLang's CustomAllReduceV2, so NVLink between all ranks"):
            gpu_all_reduce.all_reduce(library, SimpleNamespace(world_size=2, ca_comm=communicator), x)
    group.ca_comm.should_custom_ar = lambda x: False
    with pytest.raises(NotImplementedError, match="takes no sum of"):
        gpu_all_reduce.all_reduce(library, group, x)
