"""Keys and values in E4M3: what an engine stores is what the trainer's attention reads."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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


def test_extremes():
    x = torch.tensor([[0.0, 0.0], [448.0, 1.0], [449.0, -1.0], [1e-12, 0.0], [3e38, -1e30]])
    read = kv_cache.unpack(kv_cache.pack(x))
    assert read[0].tolist() == [0.0, 0.0] and read[1].tolist() == [448.0, 1.0] and read[2].tolist() == [448.0, -1.0]
    assert read.isfinite().all() and torch.equal(read, kv_cache.round_trip(x[None])[0])
    assert not kv_cache.unpack(torch.zeros(3, 2, 65, dtype=torch.uint8)).any(), "a slot that was never written"


def test_the_gradient_passes_straight_through():
    x = torch.randn(3, 2, 8, requires_grad=True)
    kv_cache.round_trip(x).backward(gradient := torch.randn(3, 2, 8))
    assert torch.equal(x.grad, gradient)


def test_the_error_is_that_of_e4m3():
    """Half a step of three bits, or half of the smallest number."""
    x = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(0))
    error = (kv_cache.round_trip(x) - x).abs()
    assert (error <= x.abs() / 16 + x.abs().amax(-1, keepdim=True) * 2**-17).all() and error.max() > 1e-3
