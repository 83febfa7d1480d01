"""What is weighed, quantized and spread to the experts' rows has the bits of one kernel after the other, in Triton's interpreter."""

from __future__ import annotations

import importlib.machinery

import pytest
import torch
from support import fake_gpu_libraries
from support.fp8_reference import check_columns, check_rows, same_bits, uneven
from support.processes import call_in_fresh_process

from megatron_rl.kernels.experts.token_groups import TokenGroups

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec: SGLang's stub modules answer that
needs_triton = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")
SENT = torch.tensor([[3, 0, 130], [1, 0, 20]])
"""Tokens of two ranks for three experts."""


def make_groups() -> TokenGroups:
    return TokenGroups.from_counts(SENT, "cpu")


def test_tokens_lie_sorted_by_expert_then_by_the_rank_they_came_from():
    groups = make_groups()
    assert groups.lengths == [128, 0, 256] and groups.rows == 384
    assert groups.places.tolist() == [0, 1, 2, *range(128, 258), 3, *range(258, 278)]
    assert groups.sources[:5].tolist() == [0, 1, 2, 133, -1] and groups.sources[groups.places].tolist() == list(range(154))
    alone = TokenGroups.from_counts(SENT.sum(0).tolist(), "cpu")
    assert alone.lengths == groups.lengths and alone.places.tolist() == [0, 1, 2, 3, *range(128, 278)]


def compare_with_one_kernel_after_the_other() -> None:
    from megatron_rl.kernels.experts.triton import collect_rows, pack, quantize_weighed, spread_packed
    from megatron_rl.kernels.quantize.triton import quantize_activation

    groups = make_groups()
    tokens = len(groups.places)
    weights = torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    for scale_format, dtype in (("pow2", torch.float32), ("fp32", torch.bfloat16)):
        x, outputs = uneven(tokens, 256, dtype), uneven(groups.rows, 256, dtype)
        spread = fake_gpu_libraries.spread(x, groups)
        rows, (data, scale) = quantize_activation(x, scale_format, rows=True, columns=True, groups=groups)
        check_rows(rows, spread, scale_format)
        for start, length in ((0, 128), (128, 256)):
            part = data[256 * start : 256 * (start + length)].view(256, length)
            check_columns((part, scale[:, start // 128 : (start + length) // 128]), spread[start : start + length], scale_format)
        weighed = collect_rows(x, torch.arange(tokens), weights)
        *found, of_weights = quantize_weighed(x, outputs, weights, groups, scale_format, columns=True)
        wanted = quantize_activation(weighed, scale_format, rows=True, columns=True, groups=groups)
        for pair, other in zip(found, wanted, strict=True):
            assert same_bits(pair, other) and [each.stride() for each in pair] == [each.stride() for each in other]
        exact = (x.double() * outputs[groups.places].double()).sum(-1)
        assert torch.allclose(of_weights.double(), exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
        rows_alone, nothing, _ = quantize_weighed(x, outputs, weights, groups, scale_format, columns=False)
        assert nothing is None and same_bits(rows_alone, found[0])
        order = torch.randperm(3 * tokens, generator=torch.Generator().manual_seed(0)).view(tokens, 3)
        assert torch.equal(pack(x, order, scale_format), fake_gpu_libraries.pack(x, order, scale_format))
    packed = torch.randint(0, 1 << 30, (tokens, 64 + 2), dtype=torch.int32)
    found, wanted = spread_packed(packed, groups), fake_gpu_libraries.spread_packed(packed, groups)
    assert same_bits(found, wanted) and found[1].stride() == (1, 384)


@needs_triton
def test_bytes_and_scales_are_those_of_one_kernel_after_the_other():
    """The interpreter is chosen when Triton is first imported."""
    call_in_fresh_process(compare_with_one_kernel_after_the_other, TRITON_INTERPRET="1")


@needs_triton
def test_shapes_that_do_not_fit_are_refused():
    from megatron_rl.kernels.experts.triton import pack, quantize_weighed, spread_packed

    for shape in ((5, 192), (4, 256)):
        with pytest.raises(ValueError, match="be of its tokens"):
            pack(torch.zeros(shape), torch.zeros(5, 2, dtype=torch.int64), "pow2")
    groups, gradient = make_groups(), torch.zeros(154, 256)
    for outputs, weights in ((torch.zeros(154, 256), 154), (torch.zeros(384, 256), 153), (torch.zeros(384, 256).bfloat16(), 154)):
        with pytest.raises(ValueError, match="does not fit outputs"):
            quantize_weighed(gradient, outputs, torch.zeros(weights), groups, "pow2", columns=True)
    for shape in ((154, 65), (153, 66)):
        with pytest.raises(ValueError, match="do not fit their groups"):
            spread_packed(torch.zeros(shape, dtype=torch.int32), groups)
