"""The norm over all heads: equal bits however ranks share the heads, and the gradient of a plain norm."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.kernels.norm.heads import AllHeadsNorm, SharedHeads, normalize


class Rank(NamedTuple):
    """A rank of a group, and the collectives of the group, which know what all ranks send."""

    number: int
    count: int
    parts: tuple[torch.Tensor, ...] = ()

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.number

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: Any) -> None:
        torch.testing.assert_close(input, self.parts[self.number], rtol=0, atol=0)
        output.copy_(torch.cat(self.parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, ranks", [(4, 2), (4, 4), (2, 4)])
def test_bits_do_not_depend_on_how_ranks_share_the_heads(dtype, heads, ranks):
    torch.manual_seed(heads)
    x, weight = torch.randn(9, heads, 32).to(dtype), torch.randn(heads * 32).to(dtype)
    whole, _ = normalize(x, weight.view(heads, 32), 1e-6, SharedHeads(heads, Rank(0, 1)))
    shares = min(ranks, heads)
    own = [x.chunk(shares, 1)[rank * shares // ranks] for rank in range(ranks)]
    sums = tuple(part.float().square().sum(-1) for part in own)
    for rank, part in enumerate(own):
        at = Rank(rank, ranks, sums)
        shared = SharedHeads(heads, at, at)
        normed, _ = normalize(part, shared.cut(weight), 1e-6, shared)
        assert torch.equal(normed, whole.chunk(shares, 1)[rank * shares // ranks])


def test_value_and_gradient_are_those_of_a_plain_norm():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 8, dtype=torch.float32, requires_grad=True), torch.randn(24, requires_grad=True)
    normed = AllHeadsNorm.apply(x, weight.view(3, 8), 1e-5, SharedHeads(3, Rank(0, 1)))
    plain = F.rms_norm(x.flatten(1), (24,), weight, 1e-5).view_as(x)
    torch.testing.assert_close(normed, plain, rtol=2e-6, atol=2e-6)
    gradient = torch.randn_like(x)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, weight), gradient) for y in (normed, plain)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
