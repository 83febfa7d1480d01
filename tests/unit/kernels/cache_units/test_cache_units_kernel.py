"""One kernel brings queries, keys and values into units of an E4M3 cache, in Triton's interpreter."""

import torch
from support.kernel_tests import in_interpreter, random

from megatron_rl.kernels.cache_units import reference


@in_interpreter
def test_units_are_the_references_also_of_slices_and_of_numbers_out_of_range():
    from megatron_rl.kernels.cache_units.triton import enter_units

    scales = torch.tensor([2.0**-3, 2.0**4])
    for tokens, heads, groups, dim in ((3, 20, 4, 64), (1, 1, 1, 16), (0, 2, 2, 32)):
        mixed = random(tokens, (heads + 2 * groups) * dim, seed=tokens) * torch.logspace(-12, 12, (heads + 2 * groups) * dim, base=2.0)
        mixed[:, -8:] = torch.tensor([0.0, -0.0, 448.0 * 16, 464.0 * 16, 1e30, -3e38, torch.inf, -torch.inf])
        parts = mixed.split([heads * dim, groups * dim, groups * dim], 1)
        for given in (parts, [part.unflatten(1, (-1, dim)) for part in parts]):
            for found, wanted in zip(enter_units(*given, scales), reference.enter_units(*given, scales), strict=True):
                assert torch.equal(found, wanted) and found.is_contiguous()
