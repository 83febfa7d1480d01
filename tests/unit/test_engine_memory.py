"""Memory that a waiting engine gives back: storages without bytes, and the same tensors after."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollout_sglang import memory


def test_tensors_lose_their_memory_and_get_it_again():
    whole = torch.ones(6, 8)
    weights = {"a": whole[:2], "b": whole[2:], "c": torch.ones(3, 4, dtype=torch.float8_e4m3fn)}
    pool = SimpleNamespace(k_buffer=[torch.full((4, 2), float("nan")) for _ in range(2)], v_buffer=[torch.ones(4, 2)])
    held = [*weights.values(), *pool.k_buffer, *pool.v_buffer]
    sizes = [tensor.untyped_storage().nbytes() for tensor in held]
    memory.release(weights, pool)
    memory.release(weights, pool)  # a second time is no harm
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
    memory.restore(memory.WEIGHTS)
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [*sizes[:3], 0, 0, 0]
    memory.restore(memory.CACHE)
    memory.restore(memory.CACHE)
    assert [tensor.untyped_storage().nbytes() for tensor in held] == sizes
    assert all(not tensor.float().any() for tensor in pool.k_buffer), "no NaN is left"
    weights["b"].fill_(2)
    assert whole[2:].eq(2).all(), "views are views of the same memory"


def test_a_cache_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="the KV cache SimpleNamespace has none of k_buffer"):
        memory.release({}, SimpleNamespace())
