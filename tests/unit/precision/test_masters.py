"""Initial master weights are evenly distributed within the rounding cell of their number, and keep its blocks and its export."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.precision.masters import hash_places, spread, spread_blocks, spread_within_blocks
from megatron_rl.precision.quantizers import dequantize, quantize
from parallel.formats import FP8, INT8
from parallel.shards import Rect

FORMATS = [FP8.with_scales("pow2"), FP8.with_scales("fp32"), INT8]
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE_BF16 = ALL_BF16[ALL_BF16.isfinite()]
EXTREMES = [-(1 << 31), -(1 << 31) + 0x10000, -1, 0, 1, 1 << 30, (1 << 31) - 1]
LEARNING_RATE = 2e-6


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_the_hash_of_a_place_does_not_depend_on_the_rectangle(data):
    whole = hash_places(1, "w", Rect(0, 0, 40, 30))
    row, col = data.draw(st.integers(0, 39)), data.draw(st.integers(0, 29))
    rect = Rect(row, col, data.draw(st.integers(1, 40 - row)), data.draw(st.integers(1, 30 - col)))
    assert torch.equal(hash_places(1, "w", rect), whole[row : row + rect.rows, col : col + rect.cols])


def test_seed_and_tensor_make_other_hashes_and_all_are_even():
    places = [hash_places(seed, name, Rect(0, 0, 500, 400)).float() / 2**31 for seed, name in ((1, "w"), (2, "w"), (1, "v"))]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((places[one] * places[two]).mean())) < 0.003  # a third for equal ones
    assert all(abs(float(each.mean())) < 0.005 and abs(float(each.square().mean()) - 1 / 3) < 0.005 for each in places)


@pytest.mark.parametrize("place", EXTREMES)
def test_every_bf16_number_keeps_its_value_under_rounding(place):
    """Strictly within half the distance to the neighbor, on either side."""
    masters = spread(FINITE_BF16, torch.full(FINITE_BF16.shape, place, dtype=torch.int32))
    assert torch.equal(masters.bfloat16().view(torch.int16), FINITE_BF16.view(torch.int16))
    assert torch.equal(masters == 0, FINITE_BF16 == 0)
    numbers, moved = FINITE_BF16.double(), masters.double()
    neighbors = torch.nextafter(FINITE_BF16, torch.where(moved > numbers, torch.inf, -torch.inf).bfloat16()).double()
    assert ((moved == numbers) | ((moved - numbers).abs() < (neighbors - numbers).abs() / 2)).all()


@pytest.mark.parametrize("dtype, free", [(torch.float16, 13), (torch.float8_e4m3fn, 20)])
def test_every_float16_and_e4m3_number_keeps_its_value_under_rounding(dtype, free):
    integers = torch.arange(1 << torch.finfo(dtype).bits, dtype=torch.int32)
    numbers = integers.to(torch.int16 if free == 13 else torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    for place in EXTREMES:
        masters = spread(numbers, torch.full(numbers.shape, place, dtype=torch.int32))
        assert torch.equal(masters.to(dtype).float(), numbers.float())


def test_a_float32_is_spread_where_it_is_a_bf16_number():
    values = torch.tensor([0.1, 0.1]).bfloat16().float() + torch.tensor([0.0, 1e-6])
    masters = spread(values, torch.full((2,), 1 << 30, dtype=torch.int32))
    assert masters[0] != values[0] and masters[0].bfloat16() == values[0].bfloat16() and masters[1] == values[1]


@pytest.mark.parametrize("number, below, above", [(1.0, 2**-9, 2**-8), (1.5, 2**-8, 2**-8), (-1.0, 2**-8, 2**-9)])
def test_masters_are_even_over_the_cell_even_if_its_lower_half_is_narrower(number, below, above):
    places = hash_places(0, "w", Rect(0, 0, 300, 300))
    masters = spread(torch.full(places.shape, number).bfloat16(), places)
    edges = torch.linspace(number - below, number + above, 7)
    shares = [float(((masters >= low) & (masters < high)).float().mean()) for low, high in pairwise(edges)]
    assert shares == pytest.approx([1 / 6] * 6, abs=0.006)


def tied_weights(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Return BF16 weights with zero padding, several maxima, and blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.randint(-12, 3, (rows, 1), generator=generator).float())
    weights[:, cols - cols // 8 :] = 0
    weights[rows // 2] = weights.abs().max()
    return weights.bfloat16()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@given(rows=st.integers(1, 300), cols=st.integers(1, 300), seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_masters_keep_the_blocks_and_the_export_of_the_numbers(format, rows, cols, seed):
    weights = tied_weights(rows, cols, seed)
    masters = spread_within_blocks(weights, hash_places(seed, "w", Rect(0, 0, rows, cols)), format)
    expected, got = quantize(weights, format), quantize(masters, format)
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8)) and torch.equal(got.scale, expected.scale)
    assert torch.equal(masters.bfloat16().view(torch.int16), weights.view(torch.int16))


def move(masters: torch.Tensor, format, step: float) -> tuple[float, float]:
    """Return what Adam's first step changes: the share of numbers, and their mean movement in its direction, in steps."""
    steps = step * torch.randn(masters.shape, generator=torch.Generator().manual_seed(7)).sign()
    before, after = quantize(masters, format), quantize(masters + steps, format)
    flipped = (before.data.view(torch.uint8) != after.data.view(torch.uint8)).float().mean()
    return float(flipped), float(((dequantize(after, format) - dequantize(before, format)) * steps.sign()).mean()) / step


@pytest.mark.parametrize("format, stored", [(FORMATS[0], (20, 25)), (FORMATS[1], (1.5, 5)), (INT8, (1.05, 1.3))], ids=str)
def test_the_first_step_moves_the_copy_as_far_as_the_masters(format, stored):
    generator = torch.Generator().manual_seed(3)
    weights = (torch.randn(1024, 2048, generator=generator) * 0.02).bfloat16()
    masters = spread_within_blocks(weights, hash_places(0, "w", Rect(0, 0, 1024, 2048)), format)
    flipped, response = move(masters, format, LEARNING_RATE)
    flipped_stored, response_stored = move(weights.float(), format, LEARNING_RATE)
    assert 0.93 < response < 1.07
    assert stored[0] < response_stored < stored[1] and flipped_stored > flipped


@pytest.mark.parametrize("format", FORMATS[:2], ids=str)
def test_masters_of_fp8_blocks_follow_at_once_in_the_same_cells(format):
    generator = torch.Generator().manual_seed(3)
    blocks = quantize(torch.randn(1024, 2048, generator=generator) * 0.02, format)
    masters = spread_blocks(blocks, hash_places(0, "w", Rect(0, 0, 1024, 2048)), format)
    values, again = dequantize(blocks, format), quantize(masters, format)
    assert torch.isclose(dequantize(again, format), values, rtol=1e-6).float().mean() > 0.99999  # fp32 scales may be an ulp apart
    assert 0.9 < move(masters, format, 1e-6)[1] < 1.1
    assert move(values, FORMATS[0], 1e-6)[1] < 0.05 or format.scale_format == "fp32"
