"""Keys and values in E4M3: what an engine stores is what the trainer's attention reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.causal_attention import causal_attention

from megatron_rl.precision import kv_cache
from megatron_rl.precision.fp8 import round_trip_1x128


@given(st.integers(0, 5), st.integers(1, 3), st.sampled_from([1, 64, 80, 128, 192]), st.sampled_from([-30, -6, 0, 20]), st.integers(0, 9))
def test_the_engine_reads_what_the_trainer_reads(tokens, heads, width, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, width, generator=generator) * 2.0**exponent * torch.rand(tokens, heads, 1, generator=generator)
    for values in (x, x.bfloat16()):
        stored, read = kv_cache.pack(values), kv_cache.round_trip(values)
        assert stored.dtype == torch.uint8 and stored.shape == (tokens, heads, width + 1)
        assert read.dtype == values.dtype and torch.equal(kv_cache.unpack(stored), read.float())
        if width == 128:
            assert torch.equal(read.float(), round_trip_1x128(values, "pow2")), "one block of the contract's formula"
    assert torch.equal(kv_cache.round_trip(kv_cache.round_trip(x)), kv_cache.round_trip(x))


def test_extremes_and_errors_match_e4m3():
    x = torch.tensor([[0.0, 0.0], [448.0, 1.0], [449.0, -1.0], [1e-12, 0.0], [3e38, -1e30]])
    read = kv_cache.unpack(kv_cache.pack(x))
    assert read[:3].tolist() == [[0.0, 0.0], [448.0, 1.0], [448.0, -1.0]]
    assert read.isfinite().all() and torch.equal(read, kv_cache.round_trip(x[None])[0])
    assert not kv_cache.unpack(torch.zeros(3, 2, 65, dtype=torch.uint8)).any(), "a slot that was never written"
    x = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(0))
    error = (kv_cache.round_trip(x) - x).abs()
    assert (error <= x.abs() / 16 + x.abs().amax(-1, keepdim=True) * 2**-17).all() and error.max() > 1e-3


@pytest.mark.parametrize("read", [kv_cache.round_trip, lambda x: kv_cache.round_trip_with_scale(x, torch.tensor(0.25))])
def test_the_gradient_passes_straight_through(read):
    x = torch.randn(3, 2, 8, requires_grad=True)
    read(x).backward(gradient := torch.randn(3, 2, 8))
    assert torch.equal(x.grad, gradient)


@given(st.integers(-20, 20), st.integers(-20, 20), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9))
def test_attention_in_units_of_a_layers_scales_has_the_bits_of_attention_to_the_values(of_keys, of_values, dtype, seed):
    """What the engine computes and what the trainer computes, with values that saturate."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 37, 64, generator=generator) for _ in range(3))
    scales = torch.tensor([2.0**of_keys, 2.0**of_values])
    q, k, v = (q / scales[0]).to(dtype), (k * 200 * scales[0]).to(dtype), (v * 200 * scales[1]).to(dtype)
    k_units, v_units = (kv_cache.to_units(x, scale) for x, scale in zip((k, v), scales, strict=True))
    assert torch.equal(k_units, k_units.to(torch.float8_e4m3fn).to(dtype)) and k_units.abs().max() == 448, "what the cache holds"
    in_units = causal_attention(q * scales[0], k_units, v_units, 0.01) * scales[1]
    read = [kv_cache.round_trip_with_scale(x, scale) for x, scale in zip((k, v), scales, strict=True)]
    assert in_units.dtype == dtype and torch.equal(in_units, causal_attention(q, *read, 0.01))


def test_scales_of_a_layer_leave_room_and_stay_if_nothing_is_known():
    amax = torch.tensor([3.0, 224.0, 224.1, 448.0, 0.0, float("nan"), float("inf")])
    assert kv_cache.choose_scales(amax, torch.full((7,), 8.0)).tolist() == [2.0**-6, 1.0, 2.0, 2.0, 8.0, 8.0, 8.0]
