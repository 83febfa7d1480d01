"""Live parameters as a sync sees them, and the released KV cache."""

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel.digest import digest, view_bytes
from parallel.shards import Rect
from rollout_sglang import rank_handler
from rollout_sglang.rank_handler import live_tensors


def test_a_weight_kept_transposed_for_a_kernel_is_seen_and_written_by_rows():
    """As SGLang keeps INT8 weights on a GPU: [K, N], its columns side by side."""
    weight = torch.arange(12, dtype=torch.int8).view(3, 4)
    engine = torch.nn.Module()
    engine.weight = torch.nn.Parameter(weight.clone().t(), requires_grad=False)
    engine.weight_scale = torch.nn.Parameter(torch.ones(3, 1), requires_grad=False)
    engine.norm = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    live = live_tensors(engine)
    assert {name: tuple(tensor.shape) for name, tensor in live.items()} == {"weight": (3, 4), "weight_scale": (3, 1), "norm": (4,)}
    assert digest(live["weight"], Rect(1, 1, 2, 2)) == digest(weight, Rect(1, 1, 2, 2))
    view_bytes(live["weight"])[2, 1] = 99
    assert engine.weight.shape == (4, 3) and engine.weight[1, 2] == 99


def test_a_convolution_of_single_channels_is_a_matrix_and_written_in_place():
    engine = torch.nn.Module()
    engine.conv1d = torch.nn.Module()
    engine.conv1d.weight = torch.nn.Parameter(torch.zeros(6, 1, 4), requires_grad=False)
    live = live_tensors(engine)["conv1d.weight"]
    assert live.shape == (6, 4)
    live[5, 3] = 2
    assert engine.conv1d.weight[5, 0, 3] == 2


def test_a_released_cache_reads_as_zeros_and_an_unknown_one_is_refused():
    fused = [torch.full((2, 4, 3), float("nan")) for _ in range(2)]  # as SGLang lays keys and values
    pool = SimpleNamespace(k_buffer=[both[0] for both in fused], v_buffer=[both[1] for both in fused])
    other = SimpleNamespace(kv_buffer=[torch.ones(4, 2)])
    for _ in range(2):  # a second time is no harm
        rank_handler.release_cache(pool)
    rank_handler.release_cache(other)
    assert not any(tensor.any() for tensor in [*fused, *other.kv_buffer]), "no NaN is left"
    pool.v_buffer[1].fill_(2)
    assert fused[1][1].eq(2).all() and not fused[1][0].any(), "views are views of the same memory"
    with pytest.raises(ValueError, match="the KV cache SimpleNamespace has none of k_buffer"):
        rank_handler.release_cache(SimpleNamespace())


def test_a_released_cache_has_no_memory_until_it_is_used():
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 256 << 20
    whole, before = torch.ones(size, dtype=torch.uint8), held()
    cache = whole[3:-5]  # begins and ends within a page
    rank_handler.release_cache(SimpleNamespace(kv_buffer=[cache]))
    assert before - held() > size * 0.9
    assert not whole.any() and cache.fill_(1).all()


def test_a_hybrid_cache_also_loses_its_states():
    states = SimpleNamespace(conv=[torch.ones(2, 3, 4)], temporal=torch.ones(2, 3, 5))
    attention = SimpleNamespace(k_buffer=[torch.ones(4, 2)], v_buffer=[torch.ones(4, 2)])
    pool = SimpleNamespace(full_kv_pool=attention, mamba_pool=SimpleNamespace(mamba_cache=states))
    held = [*attention.k_buffer, *attention.v_buffer, *states.conv, states.temporal]
    rank_handler.release_cache(pool)
    assert not any(tensor.any() for tensor in held)
