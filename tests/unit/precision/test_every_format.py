"""What holds for every quantized format: its quantizer, its reference product, and slices of a master that are cut anywhere."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_format
from support.fp8_reference import uneven_matrix

from megatron_rl.kernels.linear import make_backend
from megatron_rl.precision import slices
from megatron_rl.precision.quantized_weight import expand_scales
from megatron_rl.precision.quantizers import dequantize, quantize
from megatron_rl.precision.slices import WeightSlice, make_scales
from parallel.formats import FORMATS, FP8, TensorFormat

QUANTIZED = [format.with_scales("pow2") for format in FORMATS.values() if format.quantized]
every_format = pytest.mark.parametrize("format", [*QUANTIZED, toy_format.TOY], ids=str)


@every_format
def test_an_element_is_as_close_as_its_blocks_maximum_allows(format):
    """Three mantissa bits round a number by 1/16 of it at most; edge blocks are partial."""
    weight = uneven_matrix(200, 300)
    blocks = quantize(weight, format)
    assert [str(tensor.dtype) for tensor in blocks] == [f"torch.{format.dtype}", f"torch.{format.scale_dtype}"]
    assert tuple(blocks.scale.shape) == format.scale_grid(*weight.shape)
    block = format.block[0], format.block[1] or weight.shape[1]
    amax = F.max_pool2d(weight.abs()[None], block, block, ceil_mode=True)[0]
    assert ((dequantize(blocks, format) - weight).abs() <= expand_scales(amax, format, *weight.shape) / 16).all()


@every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(format, value):
    weight = uneven_matrix(130, 257)
    weight[129, 256] = value  # in an edge block
    with pytest.raises(ValueError, match="weight holds inf or NaN"):
        quantize(weight, format)


@every_format
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(format):
    backend, x = make_backend("emulated", format), uneven_matrix(40, 1152)
    weight = backend.prepare(quantize(uneven_matrix(256, 1152), format), None)
    whole, alone = (backend.fprop(backend.quantize(rows, rows=True, columns=False), weight) for rows in (x, x[:1]))
    assert torch.equal(alone, whole[:1])


@pytest.fixture(autouse=True)
def small_strips(monkeypatch):
    monkeypatch.setattr(slices, "_VALUES_IN_CACHE", 5000)
    with toy_format.registered():
        yield


def quantize_slices(
    weight: torch.Tensor, cuts: list[int], format: TensorFormat, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (data in the weight's order, scales) computed from the slices between `cuts`."""
    held = [(WeightSlice(*weight.shape, start, format, order), weight.view(-1)[start:end]) for start, end in pairwise(cuts)]
    scale, multipliers = make_scales(torch.stack([place.find_maxima(values) for place, values in held]).amax(0), format)
    data = torch.zeros(weight.numel(), dtype=getattr(torch, format.dtype))
    for place, values in held:
        place.quantize(values, multipliers, data[place.start : place.start + len(values)])
    return data.view(weight.shape), scale


@pytest.mark.parametrize("format", [FP8.with_scales("pow2"), FP8.with_scales("fp32"), toy_format.TOY], ids=str)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_slices_give_the_bytes_and_scales_of_the_whole_weight_wherever_it_is_cut(format, data):
    rows, cols = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, rows * cols), max_size=7))), rows * cols]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight = torch.randn(rows, cols, generator=generator) * torch.randn(rows, cols, generator=generator).exp()
    order = torch.randperm(rows, generator=generator) if data.draw(st.booleans()) else None
    values, scale = quantize_slices(weight, cuts, format, order)
    expected = quantize(weight if order is None else weight[order], format)
    if order is not None:
        values = values.view(torch.uint8)[order]
    assert torch.equal(values.view(torch.uint8), expected.data.view(torch.uint8)) and torch.equal(scale, expected.scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_shows_only_in_the_maximum_of_its_block(value):
    weight = torch.ones(200, 300)
    weight[130, 260] = value
    maxima = WeightSlice(200, 300, 0, FP8).find_maxima(weight.view(-1))
    assert maxima.isfinite().tolist() == [[True] * 3, [True, True, False]] and float(maxima[1, 2]) == float("inf")
