"""The orders of sums of shared kernels, read from code compiled for Hopper: equal for all variants, and planted differences are found."""

from contextlib import nullcontext
from unittest import mock

import compile_kernels
import kernel_orders
import pytest
from support.kernel_tests import call_with_triton, needs_triton


def find_differences(*operators, module="norm", **replaced):
    """Return the differences of these operators for few rows, while functions of a module of kernels are replaced."""
    replaces = mock.patch.multiple(f"megatron_rl.kernels.{module}.triton", **replaced) if replaced else nullcontext()
    every = kernel_orders.list_operators()
    chosen = {name: every[name] for name in operators}
    with mock.patch.object(kernel_orders, "list_operators", return_value=chosen), mock.patch.object(kernel_orders, "ROWS", (1, 16, 4096)):
        with replaces:
            return kernel_orders.find_differences(compile_kernels.intercept_launches(90))


def compare():
    """Return the differences of the project's kernels; if norms take misaligned pointers as they are; if kernels that normalize do not
    share their tiles; and if attention has other warps or splits in some launches."""
    from megatron_rl.kernels.norm import triton as norm
    from megatron_rl.kernels.split_attention import SPLIT
    from megatron_rl.kernels.split_attention import triton as split_attention

    own = find_differences(
        "norm of 128", "norm of 896", "norms of heads of 128", "log-sum of 32001", "tree of torch.float8_e4m3fn", "attention of heads of 64"
    )
    misaligned = find_differences("norm of 896", align=lambda x: x)
    tiles = iter(range(10**6))
    alternating = find_differences("norm of 128", choose_tile=lambda width: norm.choose_launch(width) | {"ROWS": 1 + next(tiles) % 2})
    launch = {"num_stages": 2, "enable_fp_fusion": False}
    spread = lambda width: launch | {"num_warps": 4 + 4 * (next(tiles) % 2)}  # noqa: E731
    attention = find_differences("attention of heads of 64", module="split_attention", choose_launch=spread)

    def halve(query, key, value, sequences, *others):
        with mock.patch.object(split_attention, "SPLIT", SPLIT // (2 if sequences.splits else 1)):
            return attend(query, key, value, sequences, *others)

    attend = split_attention.attend
    halved = find_differences("attention of heads of 64", module="split_attention", attend=halve)
    return own, misaligned, alternating, attention, halved


@pytest.mark.kernels
@needs_triton
def test_shared_kernels_have_one_order_and_planted_differences_are_found():
    own, misaligned, alternating, attention, halved = call_with_triton(compare)
    assert not own
    assert misaligned and all("at 8 bytes" in line for line in misaligned), "another order for addresses of 8 bytes"
    assert alternating and "axis 1 of tensor<2x128xf32" in alternating[0]
    assert attention and "nvidia_mma" in attention[0], "another matrix instruction"
    assert halved and all("decoded" in line and "split=1024" in line for line in halved)
