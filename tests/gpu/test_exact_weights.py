"""What quantizes slices of weights and transposes weights gives the bits of the whole weight, for widths of published models."""

import itertools

import pytest
from support.exact_weights import check_slices, check_transpose

from megatron_rl.kernels.slices import reference as slices
from megatron_rl.kernels.transpose import reference as transpose

WEIGHTS = {"cuda": ((6144, 4096), (576, 7168), (4096, 12288)), "cpu": ((200, 300),)}
TRANSPOSED = {"cuda": (((6144, 4096), 0), ((576, 7168), 64), ((16, 1536, 2048), 0)), "cpu": (((200, 300), 56),)}


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_slices_give_the_bytes_of_the_whole_weight(device, scale_format):
    for (rows, cols), ordered in itertools.product(WEIGHTS[device], (False, True)):
        size = rows * cols
        for cuts in ((0, size), (0, 7, cols + 1, size // 4, size // 2 + 64, size - 3, size)):
            check_slices(slices, rows, cols, cuts, ordered, scale_format, device)


def test_weights_are_transposed(device):
    for shape, padding in TRANSPOSED[device]:
        check_transpose(transpose, shape, padding, device)
