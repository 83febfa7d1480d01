"""Keys and values in units of a layer's scales: the reference's bytes, and attention in units with the bits of attention to the values."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.kernels.cache_units.reference import enter_units
from megatron_rl.precision import kv_cache

SCALES = torch.tensor([2.0**-3, 2.0**4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_units_are_the_references(device, dtype):
    exponents = torch.randint(-40, 30, (4096, 64), generator=torch.Generator().manual_seed(0))
    x = torch.cat(
        [torch.randn(4096, 64) * 2.0**exponents, torch.tensor([[0.0, -0.0, 448.0, 464.0, 480.0, -1e30, 3e38, 2**-10]]).repeat(1, 8)]
    )
    for scale in SCALES:
        units = kv_cache.to_units(x.to(device, dtype), scale.to(device))
        assert units.dtype == dtype and torch.equal(units.cpu(), kv_cache.to_units(x.to(dtype), scale))
        found = enter_units(*(x.to(device, dtype),) * 3, SCALES.to(device))
        assert torch.equal(found[1], kv_cache.to_units(x.to(device, dtype), SCALES[0].to(device)))
        assert torch.equal(found[0], x.to(device, dtype) * SCALES[0].to(device))
        assert units.isfinite().all() and torch.equal(units.to(torch.float8_e4m3fn).to(dtype), units)


def test_attention_in_units_has_the_bits_of_attention_to_the_values(device):
    q, k, v = (torch.randn(2, 4, 300, 64, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16) for seed in range(3))
    key_scale, value_scale = SCALES.to(device)
    units = kv_cache.to_units(k, key_scale), kv_cache.to_units(v, value_scale)
    read = kv_cache.round_trip_with_scale(k, key_scale), kv_cache.round_trip_with_scale(v, value_scale)
    in_units = F.scaled_dot_product_attention(q * key_scale, *units, is_causal=True) * value_scale
    assert torch.equal(in_units, F.scaled_dot_product_attention(q, *read, is_causal=True))
