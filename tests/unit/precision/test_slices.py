"""Slices of a master, cut anywhere, become the bytes and scales of the whole weight."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_format

from megatron_rl.precision import slices
from megatron_rl.precision.quantizers import quantize
from megatron_rl.precision.slices import WeightSlice, make_scales
from parallel.formats import FP8, TensorFormat


@pytest.fixture(autouse=True)
def small_strips(monkeypatch):
    monkeypatch.setattr(slices, "_VALUES_IN_CACHE", 5000)
    with toy_format.registered():
        yield


def quantize_slices(
    weight: torch.Tensor, cuts: list[int], format: TensorFormat, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data in the weight's own order, scales) made from the slices between `cuts`."""
    held = [(WeightSlice(*weight.shape, start, format, order), weight.view(-1)[start:end]) for start, end in pairwise(cuts)]
    scale, multipliers = make_scales(torch.stack([place.find_maxima(values) for place, values in held]).amax(0), format)
    data = torch.zeros(weight.numel(), dtype=getattr(torch, format.dtype))
    for place, values in held:
        place.quantize(values, multipliers, data[place.start : place.start + len(values)])
    return data.view(weight.shape), scale


@pytest.mark.parametrize("format", [FP8.with_scales("pow2"), FP8.with_scales("fp32"), toy_format.TOY], ids=str)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_they_are_those_of_the_whole_wherever_it_is_cut(format, data):
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
def test_what_is_not_finite_shows_in_its_blocks_maximum_alone(value):
    weight = torch.ones(200, 300)
    weight[130, 260] = value
    maxima = WeightSlice(200, 300, 0, FP8).find_maxima(weight.view(-1))
    assert maxima.isfinite().tolist() == [[True] * 3, [True, True, False]] and float(maxima[1, 2]) == float("inf")
