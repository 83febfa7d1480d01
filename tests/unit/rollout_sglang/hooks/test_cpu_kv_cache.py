"""An E4M3 cache gives back what the trainer's attention reads."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.precision import kv_cache
from rollout_sglang.hooks import cpu_kv_cache

SLOTS, HEADS, WIDTH, RANK, ROPE = 7, 2, 16, 24, 8
PLACE = SimpleNamespace(loc=torch.tensor([3, 1, 6]))
LAYER = SimpleNamespace(layer_id=5)


@pytest.fixture
def store_e4m3(monkeypatch):
    def store(kv: str) -> None:
        monkeypatch.setenv(cpu_kv_cache.KV_VARIABLE, kv)
        clear()

    def clear() -> None:
        for function in (cpu_kv_cache.stores_e4m3, cpu_kv_cache.scales_by_layer):
            function.cache_clear()

    yield store
    clear()


@pytest.fixture
def stores_e4m3(store_e4m3):
    store_e4m3("e4m3")


def read(cache: torch.Tensor, heads: int, first: int) -> torch.Tensor:
    rows = (PLACE.loc[:, None] * heads + torch.arange(heads)).flatten()
    return cpu_kv_cache.read_rows(cache, rows, first).view(len(PLACE.loc), heads, -1)


def test_keys_and_values(stores_e4m3):
    pool = SimpleNamespace(start_layer=5, head_dim=WIDTH)

    def create(pool: SimpleNamespace) -> None:
        shapes = cpu_kv_cache.get_buffer_shapes(lambda _: ((SLOTS, HEADS, WIDTH), (SLOTS, HEADS, WIDTH)), pool)
        pool.k_buffer, pool.v_buffer = ([torch.zeros(shape, dtype=pool.store_dtype)] for shape in shapes)

    cpu_kv_cache.create_buffers(create, pool)
    assert pool.dtype == torch.float8_e4m3fn and cpu_kv_cache.has_scales(pool)
    assert pool.k_buffer[0].nbytes == SLOTS * HEADS * (WIDTH + 1)
    keys, values = torch.randn(3, HEADS, WIDTH), torch.randn(3, HEADS, WIDTH)
    cpu_kv_cache.set_keys_and_values(None, pool, LAYER, PLACE, keys, values)
    for buffer, wanted in ((pool.k_buffer[0], keys), (pool.v_buffer[0], values)):
        assert torch.equal(read(buffer.view(pool.dtype), HEADS, WIDTH + 1), kv_cache.round_trip(wanted))
    with pytest.raises(NotImplementedError):
        cpu_kv_cache.set_keys_and_values(None, pool, LAYER, PLACE, keys, values, k_scale=0.5)


def test_latents_and_positions(stores_e4m3):
    pool = SimpleNamespace(start_layer=5, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, kv_cache_dim=RANK + ROPE)

    def create(pool: SimpleNamespace) -> None:
        pool.kv_buffer = [torch.zeros(SLOTS, 1, pool.kv_cache_dim, dtype=pool.store_dtype)]
        pool.get_key_buffer = lambda _: pool.kv_buffer[0].view(pool.dtype)

    cpu_kv_cache.create_latent_buffers(create, pool)
    assert pool.kv_buffer[0].nbytes == SLOTS * (RANK + ROPE + 2) and cpu_kv_cache.has_scales(pool)
    rows = torch.randn(3, 1, RANK + ROPE) * torch.cat([torch.ones(RANK), torch.full((ROPE,), 50.0)])
    cpu_kv_cache.set_latents(None, pool, LAYER, PLACE, rows, rows[..., :RANK])
    latents, positions = (kv_cache.round_trip(part) for part in rows.split([RANK, ROPE], -1))
    cached = cpu_kv_cache.get_latents(None, pool, 5)
    assert torch.equal(read(cached, 1, RANK + 1), latents)
    assert torch.equal(read(pool.get_key_buffer(5), 1, RANK + 1), torch.cat([latents, positions], -1))


def test_without_it_sglang_stores_what_it_would():
    calls = []
    pool = SimpleNamespace(dtype=torch.float32, kv_cache_dim=RANK + ROPE)
    cpu_kv_cache.create_latent_buffers(lambda pool: calls.append(pool.kv_cache_dim), pool)
    cpu_kv_cache.set_keys_and_values(lambda *args, **named: calls.append((args[3:], named)), pool, LAYER, PLACE, "k", "v", k_scale=1)
    assert calls == [RANK + ROPE, (("k", "v"), {"k_scale": 1})] and pool.dtype == torch.float32
    cache = torch.randn(SLOTS, HEADS, WIDTH)
    assert torch.equal(read(cache, HEADS, WIDTH), cache[PLACE.loc])
