"""UE8M0 holds the values of power-of-two scales, in DeepGEMM's layout, and refuses all others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fp8_reference import unpack_scales

from megatron_rl.precision.fp8 import quantize_1x128, quantize_weight
from megatron_rl.precision.ue8m0 import is_ue8m0, pack_scales

EXPONENTS = st.integers(1, 254)


def make_scales(exponents: list[int], groups: int) -> torch.Tensor:
    """Return powers of two float32 `[rows, groups]` from biased exponents."""
    return (torch.tensor(exponents, dtype=torch.int32) << 23).view(torch.float32).view(-1, groups)


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_packed_scales_are_unpacked_bit_for_bit(data, rows, groups):
    scale = make_scales(data.draw(st.lists(EXPONENTS, min_size=rows * groups, max_size=rows * groups)), groups)
    packed = pack_scales(scale, rows)
    assert packed.dtype == torch.int32 and packed.shape == (rows, -(-groups // 4))
    assert packed.stride(0) == 1 and packed.stride(1) % 4 == 0 and packed.stride(1) - rows in range(4)
    assert torch.equal(unpack_scales(packed, groups).view(torch.int32), scale.view(torch.int32))
    for row in range(rows):  # each byte at its place, and zeros where a word has no group
        word = [packed[row, group // 4].item() >> 8 * (group % 4) & 0xFF for group in range(-(-groups // 4) * 4)]
        assert word == [*(scale[row].view(torch.int32) >> 23).tolist(), *[0] * (-groups % 4)]


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 128))
def test_each_row_of_a_block_has_its_scale(data, blocks, groups, last):
    """The last block of a weight's rows may be partial."""
    rows, count = (blocks - 1) * 128 + last, blocks * groups
    scale = make_scales(data.draw(st.lists(EXPONENTS, min_size=count, max_size=count)), groups)
    unpacked = unpack_scales(pack_scales(scale, rows), groups)
    assert torch.equal(unpacked, scale[torch.arange(rows) // 128])


def test_experts_are_packed_one_after_the_other():
    scale = make_scales(list(range(1, 61)), 5).view(4, 3, 5)
    packed = pack_scales(scale, 300)
    assert packed.shape == (4, 300, 2) and packed.stride() == (600, 1, 300)
    for expert in range(4):
        assert torch.equal(packed[expert], pack_scales(scale[expert], 300))


@given(st.integers(-(2**31), 2**31 - 1))
def test_only_normal_positive_powers_of_two_are_packed(bits):
    scale = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
    suits = bits in [exponent << 23 for exponent in range(1, 255)]
    assert bool(is_ue8m0(scale)) is suits
    if suits:
        assert torch.equal(unpack_scales(pack_scales(scale, 1), 1), scale)
    else:
        with pytest.raises(ValueError, match="no UE8M0 form"):
            pack_scales(scale, 1)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-4, 1.0, 1e30])
def test_all_scales_of_the_contract_have_this_form_but_fp32_ones(size):
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * size
    for quantize in (quantize_weight, quantize_1x128):
        scale = quantize(x, "pow2")[1]
        assert is_ue8m0(scale).all() and torch.equal(unpack_scales(pack_scales(scale, len(scale)), 3), scale)
    assert not is_ue8m0(quantize_weight(x + size, "fp32")[1]).all() or size == 0


def test_the_exponent_alone_is_another_number_for_fp32_scales():
    """This is what both libraries read of a scale on Blackwell, so FP32 scales are refused there."""
    scale = quantize_weight(torch.randn(256, 384, generator=torch.Generator().manual_seed(0)), "fp32")[1]
    exponent = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    assert (exponent != scale).any() and (exponent <= scale).all() and (scale < 2 * exponent).all()
