"""Memory that a waiting engine gives back: storages without bytes, and the same tensors after."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollout_sglang import rank_handler


def test_a_cache_loses_its_memory_and_gets_it_again():
    fused = [torch.full((2, 4, 3), float("nan")) for _ in range(2)]  # as SGLang lays keys and values
    pool = SimpleNamespace(k_buffer=[both[0] for both in fused], v_buffer=[both[1] for both in fused])
    other = SimpleNamespace(kv_buffer=[torch.ones(4, 2)])
    rank_handler.release_cache(pool)
    rank_handler.release_cache(pool)  # a second time is no harm
    rank_handler.release_cache(other)
    held = [*fused, *pool.k_buffer, *pool.v_buffer, *other.kv_buffer]
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * 7
    rank_handler.restore_cache()
    rank_handler.restore_cache()
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [2 * 4 * 3 * 4] * 6 + [4 * 2 * 4]
    assert not any(tensor.any() for tensor in held), "no NaN is left"
    pool.v_buffer[1].fill_(2)
    assert fused[1][1].eq(2).all() and not fused[1][0].any(), "views are views of the same memory"


def test_a_cache_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="the KV cache SimpleNamespace has none of k_buffer"):
        rank_handler.release_cache(SimpleNamespace())
