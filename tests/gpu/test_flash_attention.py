"""FlashAttention of packed sequences computes what one sequence after the other gives."""

import pytest
import torch

from megatron_rl.kernels.attention import reference as packed_attention

pytestmark = pytest.mark.gpu
LENGTHS = [1, 5, 300, 33, 64, 1000, 1]


@pytest.mark.parametrize("heads, groups, width, values", [(8, 8, 128, 128), (8, 2, 64, 64), (4, 4, 192, 128)])
def test_flash_is_one_by_one(heads, groups, width, values):
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((heads, width), (groups, width), (groups, values))
    inputs = [torch.randn(sum(LENGTHS), *shape, generator=generator, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    found = packed_attention.flash_attention(*inputs, starts, max(LENGTHS), None)
    wanted = packed_attention.sdpa_per_sequence(*(x.float() for x in inputs), LENGTHS, None)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
    gradient = torch.randn(found.shape, generator=generator, device="cuda")
    ours = torch.autograd.grad(found, inputs, gradient.bfloat16())
    for one, other in zip(ours, torch.autograd.grad(wanted, inputs, gradient), strict=True):
        assert (one.float() - other.float()).norm() < 2e-2 * other.float().norm()
