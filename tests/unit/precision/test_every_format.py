"""What holds for every quantized format: its quantizer, its reference product, and slices of a master that are cut anywhere."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_format

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.slices import WeightSlice
from megatron_rl.kernels.slices import reference as slices
from megatron_rl.kernels.slices.reference import find_maxima, quantize_slice
from megatron_rl.precision.quantized_weight import QuantizedWeight, expand_scales
from megatron_rl.precision.quantizers import dequantize, make_scales, quantize
from parallel.formats import FORMATS, FP8, TensorFormat

QUANTIZED = [format.with_scales("pow2") for format in FORMATS.values() if format.quantized]
every_format = pytest.mark.parametrize("format", [*QUANTIZED, toy_format.TOY], ids=str)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


@every_format
def test_an_element_is_as_close_as_its_blocks_maximum_allows(format):
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
def test_values_that_are_not_finite_are_refused(format, value):
    weight = random(130, 257)
    weight[129, 256] = value  # in an edge block
    with pytest.raises(ValueError, match="weight holds inf or NaN"):
        quantize(weight, format)


@every_format
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(format):
    backend, x = make_backend("emulated", format), random(40, 1152)
    weight = backend.prepare(quantize(random(256, 1152), format), None)
    whole, alone = (backend.fprop(backend.quantize(rows, rows=True, columns=False), weight) for rows in (x, x[:1]))
    assert torch.equal(alone, whole[:1])


@pytest.fixture(autouse=True)
def small_strips(monkeypatch):
    monkeypatch.setattr(slices, "_VALUES_IN_CACHE", 5000)
    with toy_format.registered():
        yield


def quantize_slices(weight: torch.Tensor, cuts: list[int], format: TensorFormat, order: torch.Tensor | None) -> QuantizedWeight:
    """Return (data in the weight's order, scales) computed from the slices between `cuts`."""
    held = [(WeightSlice(*weight.shape, start, format, order), weight.view(-1)[start:end]) for start, end in pairwise(cuts)]
    scale, multipliers = make_scales(torch.stack([find_maxima(values, place) for place, values in held]).amax(0), format)
    data = torch.zeros(weight.numel(), dtype=getattr(torch, format.dtype))
    for place, values in held:
        quantize_slice(values, place, multipliers, data[place.start : place.start + len(values)])
    return QuantizedWeight(data.view(weight.shape), scale)


@pytest.mark.parametrize("format", [FP8.with_scales("pow2"), FP8.with_scales("fp32"), toy_format.TOY], ids=str)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_slices_give_the_bytes_and_scales_of_the_whole_weight_wherever_it_is_cut(format, data):
    rows, cols = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, rows * cols), max_size=7))), rows * cols]
    seed = data.draw(st.integers(0, 99))
    weight = random(rows, cols, seed=seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)) if data.draw(st.booleans()) else None
    values, scale = quantize_slices(weight, cuts, format, order)
    ordered = slice(None) if order is None else order
    expected = quantize(weight[ordered], format)
    assert torch.equal(values.view(torch.uint8)[ordered], expected.data.view(torch.uint8)) and torch.equal(scale, expected.scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_shows_only_in_the_maximum_of_its_block(value):
    weight = torch.ones(200, 300)
    weight[130, 260] = value
    maxima = find_maxima(weight.view(-1), WeightSlice(200, 300, 0, FP8))
    assert maxima.isfinite().tolist() == [[True] * 3, [True, True, False]] and float(maxima[1, 2]) == float("inf")
