"""E4M3 caches: each gives back what the trainer reads; attention layers with scales for keys and values, and what is refused."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.precision import kv_cache
from rollout_sglang.hooks import e4m3_cache
from rollout_sglang.rank_handler import live_tensors

SLOTS, HEADS, WIDTH, RANK, ROPE = 7, 2, 16, 24, 8
PLACE = SimpleNamespace(loc=torch.tensor([3, 1, 6]))
LAYER = SimpleNamespace(layer_id=5)


@pytest.fixture
def stores(monkeypatch):
    """`stores(kv)` chooses how the engine stores keys and values."""

    def clear() -> None:
        e4m3_cache.stores_e4m3.cache_clear()
        e4m3_cache.scales_by_layer.cache_clear()

    def choose(kv: str) -> None:
        monkeypatch.setenv(e4m3_cache.KV_VARIABLE, kv)
        clear()

    yield choose
    clear()


def read(cache: torch.Tensor, heads: int, first: int) -> torch.Tensor:
    rows = (PLACE.loc[:, None] * heads + torch.arange(heads)).flatten()
    return e4m3_cache.read_rows(cache, rows, first).view(len(PLACE.loc), heads, -1)


@pytest.mark.parametrize("kv", ["e4m3", "e4m3_per_layer"])
def test_keys_and_values(stores, kv):
    """With scales of layers, the cache of a CPU holds what it gets: units of these scales."""
    stores(kv)
    pool, own_scale = SimpleNamespace(start_layer=5, head_dim=WIDTH), kv == "e4m3"

    def create(pool: SimpleNamespace) -> None:
        shapes = e4m3_cache.get_buffer_shapes(lambda _: ((SLOTS, HEADS, WIDTH), (SLOTS, HEADS, WIDTH)), pool)
        pool.k_buffer, pool.v_buffer = ([torch.zeros(shape, dtype=pool.store_dtype)] for shape in shapes)

    e4m3_cache.create_buffers(create, pool)
    assert pool.dtype == torch.float8_e4m3fn and e4m3_cache.has_scales(pool) == own_scale
    assert pool.k_buffer[0].nbytes == SLOTS * HEADS * (WIDTH + own_scale)
    keys, values = torch.randn(3, HEADS, WIDTH), torch.randn(3, HEADS, WIDTH)
    if not own_scale:
        keys, values = (kv_cache.to_units(each, torch.tensor(2.0**-7)) for each in (keys, values))
    e4m3_cache.set_keys_and_values(None, pool, LAYER, PLACE, keys, values)
    for buffer, wanted in ((pool.k_buffer[0], keys), (pool.v_buffer[0], values)):
        read_back = read(buffer.view(pool.dtype), HEADS, WIDTH + own_scale)
        assert torch.equal(read_back, kv_cache.round_trip(wanted) if own_scale else wanted)
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        buffer.zero_()
    hybrid = {"k_scale": 1.0, "v_scale": 1.0, "layer_id_override": 0, "dcp_kv_mask": None}  # what SGLang's hybrid pool adds
    e4m3_cache.set_keys_and_values(None, pool, SimpleNamespace(layer_id=9), PLACE, keys, values, **hybrid)
    assert torch.equal(read(pool.v_buffer[0].view(pool.dtype), HEADS, WIDTH + own_scale), read_back)
    if own_scale:
        with pytest.raises(NotImplementedError):
            e4m3_cache.set_keys_and_values(None, pool, LAYER, PLACE, keys, values, k_scale=0.5)


def test_latents_and_positions(stores):
    stores("e4m3")
    pool = SimpleNamespace(start_layer=5, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, kv_cache_dim=RANK + ROPE)

    def create(pool: SimpleNamespace) -> None:
        pool.kv_buffer = [torch.zeros(SLOTS, 1, pool.kv_cache_dim, dtype=pool.store_dtype)]
        pool.get_key_buffer = lambda _: pool.kv_buffer[0].view(pool.dtype)

    e4m3_cache.create_latent_buffers(create, pool)
    assert pool.kv_buffer[0].nbytes == SLOTS * (RANK + ROPE + 2) and e4m3_cache.has_scales(pool)
    rows = torch.randn(3, 1, RANK + ROPE) * torch.cat([torch.ones(RANK), torch.full((ROPE,), 50.0)])
    e4m3_cache.set_latents(None, pool, LAYER, PLACE, rows, rows[..., :RANK])
    latents, positions = (kv_cache.round_trip(part) for part in rows.split([RANK, ROPE], -1))
    cached = e4m3_cache.get_latents(None, pool, 5)
    assert torch.equal(read(cached, 1, RANK + 1), latents)
    assert torch.equal(read(pool.get_key_buffer(5), 1, RANK + 1), torch.cat([latents, positions], -1))


def test_without_e4m3_sglang_stores_what_it_would():
    calls = []
    pool = SimpleNamespace(dtype=torch.float32, kv_cache_dim=RANK + ROPE)
    e4m3_cache.create_latent_buffers(lambda pool: calls.append(pool.kv_cache_dim), pool)
    e4m3_cache.set_keys_and_values(lambda *args, **named: calls.append((args[3:], named)), pool, LAYER, PLACE, "k", "v", k_scale=1)
    assert calls == [RANK + ROPE, (("k", "v"), {"k_scale": 1})] and pool.dtype == torch.float32
    cache = torch.randn(SLOTS, HEADS, WIDTH)
    assert torch.equal(read(cache, HEADS, WIDTH), cache[PLACE.loc])


SCALES = torch.tensor([0.5, 4.0])


class RadixAttention(torch.nn.Module):
    """SGLang's, as far as the hooks see it; its cache is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = self.v_scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        self.k_scale_float, self.v_scale_float, self.cache = None, 1.0, []

    def forward(self, q, k, v, batch, save_kv_cache=True):
        self.cache.append((k, v))
        return q + 1


@pytest.fixture
def attention(stores):
    stores("e4m3_per_layer")
    attention = RadixAttention.__new__(RadixAttention)
    e4m3_cache.add_scales(RadixAttention.__init__, attention)
    return attention


def test_a_layer_attends_in_units_of_scales_that_the_sync_fills(attention):
    q, k, v = (torch.randn(5, 32) * 900 for _ in range(3))
    live_tensors(torch.nn.ModuleDict({"attn": attention}))["attn.kv_scales"].copy_(SCALES)
    out = e4m3_cache.attend_in_units(RadixAttention.forward, attention, q, k, v, None)
    assert torch.equal(out, (q * 0.5 + 1) * 4)
    for stored, values, scale in zip(attention.cache[0], (k, v), SCALES, strict=True):
        assert torch.equal(stored, kv_cache.to_units(values, scale)) and stored.isfinite().all()


def test_a_cache_that_is_written_elsewhere_and_an_attention_that_rounds_queries_are_refused(attention):
    q = torch.ones(1, 4)
    for k, named in ((None, {}), (q, {"k_rope": q}), (q, {"save_kv_cache": False})):
        with pytest.raises(NotImplementedError, match="written elsewhere"):
            e4m3_cache.attend_in_units(RadixAttention.forward, attention, q, k, q, None, **named)
    e4m3_cache.check_backend(type("FlashInferAttnBackend", (), {})())
    for name in ("FlashAttentionBackend", "TritonAttnBackend", "FlashInferMLAAttnBackend"):
        with pytest.raises(ValueError, match=f"SGLang's {name} is not known to leave queries"):
            e4m3_cache.check_backend(type(name, (), {})())


@pytest.mark.parametrize("name, stale", [("k_scale_float", 0.5), ("v_scale_float", 2.0), ("v_scale", torch.tensor(0.25))])
def test_a_stale_copy_that_kernels_would_read_is_named(attention, name, stale):
    model = torch.nn.ModuleDict({"attn": attention})
    e4m3_cache.check_copies(model)
    vars(attention)[name] = stale
    attention._parameters.pop(name, None)
    line = rf"^attn\.{name} is {float(stale)}, not 1: kernels would multiply by it in addition to attn\.kv_scales$"
    with pytest.raises(ValueError, match=line):
        e4m3_cache.check_copies(model)


@pytest.mark.parametrize("file, line", [
    ("srt/layers/attention/flashattention_backend.py", "q = q.to(self.kv_cache_dtype)"),
    ("kernels/ops/attention/extend_attention.py", "qk = tl.dot(q.to(k.dtype), k)"),
    ("kernels/ops/attention/decode_attention.py", "acc += tl.dot(p.to(v.dtype), v)"),
    ("srt/layers/attention/flashinfer_backend.py", "self.q_data_type = model_runner.dtype"),
    ("srt/layers/attention/flashinfer_backend.py", "k_scale=layer.k_scale_float,"),
    ("srt/mem_cache/memory_pool.py", "cache_k = cache_k.to(self.dtype)"),
    ("srt/models/utils.py", "and pool.dtype == torch.bfloat16"),  # writes of keys and values by the rotary embedding's kernel
])  # fmt: skip
def test_sglangs_sources_support_the_choice_of_a_backend(file, line):
    """FA3 and Triton quantize queries or probabilities, FlashInfer does not; a Python copy of the scale goes into graphs."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    assert line in (Path(root) / file).read_text()
