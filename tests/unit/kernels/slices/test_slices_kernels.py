"""The kernels that quantize slices of weights give the bits of the reference, in Triton's interpreter; `test_every_format.py` has the
reference's own tests."""

import itertools

import pytest
import torch
from support.exact_weights import check_slices
from support.kernel_tests import in_interpreter


@pytest.mark.kernels
@in_interpreter
def test_maxima_and_bytes_of_slices_are_the_references():
    from megatron_rl.kernels.slices import triton as kernels

    for (rows, cols), ordered in itertools.product(((200, 300), (64, 256)), (False, True)):
        size = rows * cols
        for cuts in ((0, size), (0, 7, cols + 1, size // 2, size // 2, size - 3, size)):
            for scale_format in ("pow2", "fp32"):
                check_slices(kernels, rows, cols, cuts, ordered, scale_format)


@in_interpreter
def test_values_that_are_not_finite_show_in_the_maximum_of_their_block():
    from megatron_rl.kernels.slices import WeightSlice
    from megatron_rl.kernels.slices.triton import find_maxima
    from parallel.formats import FORMATS, FP8

    for value in (float("nan"), float("inf"), -float("inf")):
        weight = torch.ones(130, 200)
        weight[129, 199] = value
        assert find_maxima(weight.view(-1), WeightSlice(130, 200, 0, FP8)).tolist() == [[1.0, 1.0], [1.0, float("inf")]]
    with pytest.raises(ValueError, match="slices in int8"):
        find_maxima(weight.view(-1), WeightSlice(130, 200, 0, FORMATS["int8"]))
