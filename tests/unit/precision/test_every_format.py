"""What holds for every quantized format: its quantizer, and its reference product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import toy_format

from megatron_rl.kernels.linear import make_backend
from megatron_rl.precision.quantized_weight import expand_scales
from megatron_rl.precision.quantizers import dequantize, quantize
from parallel.formats import FORMATS

QUANTIZED = [format.with_scales("pow2") for format in FORMATS.values() if format.quantized]
every_format = pytest.mark.parametrize("format", [*QUANTIZED, toy_format.TOY], ids=str)


@pytest.fixture(autouse=True)
def registered():
    with toy_format.registered():
        yield


def random(*shape: int) -> torch.Tensor:
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


@every_format
def test_an_element_is_as_near_as_its_blocks_maximum_lets_it(format):
    """Three mantissa bits round a number by 1/16 of it at most; edge blocks are partial."""
    weight = random(200, 300)
    blocks = quantize(weight, format)
    assert [str(tensor.dtype) for tensor in blocks] == [f"torch.{format.dtype}", f"torch.{format.scale_dtype}"]
    assert tuple(blocks.scale.shape) == format.scale_grid(*weight.shape)
    block = format.block[0], format.block[1] or weight.shape[1]
    amax = F.max_pool2d(weight.abs()[None], block, block, ceil_mode=True)[0]
    assert ((dequantize(blocks, format) - weight).abs() <= expand_scales(amax, format, *weight.shape) / 16).all()


@every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(format, value):
    weight = random(128, 256)
    weight[3, 200] = value
    with pytest.raises(ValueError, match="weight holds inf or NaN"):
        quantize(weight, format)


@every_format
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(format):
    backend, x = make_backend("emulated", format), random(40, 1152)
    weight = backend.prepare(quantize(random(256, 1152), format), None)
    whole, alone = (backend.fprop(backend.quantize(rows, rows=True, columns=False), weight) for rows in (x, x[:1]))
    assert torch.equal(alone, whole[:1])
