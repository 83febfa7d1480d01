"""The reference quantiser gives the same bytes and scales on a GPU as on the CPU, in both scale formats."""

import pytest
import torch

from megatron_rl.precision.fp8 import quantize_weight, round_trip_1x128, round_trip_128x1

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def _matrix() -> torch.Tensor:
    values = torch.randn(384, 640, generator=torch.Generator().manual_seed(0))
    values[:128, :128] = 0
    values[200, 300] = 1e4
    values[300:, :64] *= 1e-9
    return values


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_weight_blocks_are_the_same_bytes(scale_format):
    here, there = quantize_weight(_matrix(), scale_format), quantize_weight(_matrix().cuda(), scale_format)
    assert torch.equal(here.data.view(torch.uint8), there.data.cpu().view(torch.uint8))
    assert torch.equal(here.scale.view(torch.int32), there.scale.cpu().view(torch.int32))


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("round_trip", [round_trip_1x128, round_trip_128x1])
def test_activations_round_to_the_same_values(scale_format, round_trip):
    assert torch.equal(round_trip(_matrix(), scale_format), round_trip(_matrix().cuda(), scale_format).cpu())
