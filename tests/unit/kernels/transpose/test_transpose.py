"""The kernel that transposes the bytes of weights, in Triton's interpreter."""

import pytest
import torch
from support.exact_weights import check_transpose
from support.kernel_tests import in_interpreter


@in_interpreter
def test_bytes_are_transposed_with_zeros_in_the_padding():
    from megatron_rl.kernels.transpose import triton as kernels

    for shape, padding in (((256, 128), 0), ((576, 384), 64), ((16, 128), 112), ((3, 128, 256), 0), ((20, 130), 0), ((0, 128), 128)):
        check_transpose(kernels, shape, padding)
    with pytest.raises(ValueError, match="no multiple of 4"):
        kernels.transpose_bytes(torch.zeros(6, 8, dtype=torch.uint8))
