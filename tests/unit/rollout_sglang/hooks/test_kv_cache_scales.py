"""Attention layers with a scale for keys and one for values: what SGLang's own code gets of them, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.precision import kv_cache
from rollout_sglang.hooks import cpu_kv_cache, kv_cache_scales
from rollout_sglang.rank_handler import live_tensors

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
def attention(monkeypatch):
    monkeypatch.setenv(kv_cache_scales.KV_VARIABLE, "e4m3_per_layer")
    functions = kv_cache_scales.scales_by_layer, cpu_kv_cache.stores_e4m3
    for function in functions:
        function.cache_clear()
    attention = RadixAttention.__new__(RadixAttention)
    kv_cache_scales.add_scales(RadixAttention.__init__, attention)
    yield attention
    for function in functions:
        function.cache_clear()


def test_a_layer_attends_in_units_of_scales_that_the_sync_fills(attention):
    q, k, v = (torch.randn(5, 32) * 900 for _ in range(3))
    live_tensors(torch.nn.ModuleDict({"attn": attention}))["attn.kv_scales"].copy_(SCALES)
    out = kv_cache_scales.attend_in_units(RadixAttention.forward, attention, q, k, v, None)
    assert torch.equal(out, (q * 0.5 + 1) * 4)
    for stored, values, scale in zip(attention.cache[0], (k, v), SCALES, strict=True):
        assert torch.equal(stored, kv_cache.to_units(values, scale)) and stored.isfinite().all()


def test_the_cache_of_a_cpu_holds_units(attention):
    pool = SimpleNamespace(start_layer=5, head_dim=16)
    (shape, _) = cpu_kv_cache.get_buffer_shapes(lambda _: ((7, 2, 16), (7, 2, 16)), pool)
    cpu_kv_cache.create_buffers(lambda pool: None, pool)
    pool.k_buffer, pool.v_buffer = ([torch.zeros(shape, dtype=pool.store_dtype)] for _ in range(2))
    keys, values = (kv_cache.to_units(torch.randn(3, 2, 16), torch.tensor(2.0**-7)) for _ in range(2))
    cpu_kv_cache.set_keys_and_values(None, pool, SimpleNamespace(layer_id=5), SimpleNamespace(loc=torch.tensor([3, 1, 6])), keys, values)
    assert pool.dtype == torch.float8_e4m3fn and not cpu_kv_cache.has_scales(pool)
    rows = torch.tensor([6, 7, 2, 3, 12, 13])  # heads of those slots
    for buffer, wanted in ((pool.k_buffer[0], keys), (pool.v_buffer[0], values)):
        assert torch.equal(cpu_kv_cache.read_rows(buffer.view(pool.dtype), rows, 16).view(3, 2, 16), wanted)


def test_a_cache_that_is_written_elsewhere_is_refused(attention):
    q = torch.ones(1, 4)
    for k, named in ((None, {}), (q, {"k_rope": q}), (q, {"save_kv_cache": False})):
        with pytest.raises(NotImplementedError, match="written elsewhere"):
            kv_cache_scales.attend_in_units(RadixAttention.forward, attention, q, k, q, None, **named)


@pytest.mark.parametrize("name, stale", [("k_scale_float", 0.5), ("v_scale_float", 2.0), ("v_scale", torch.tensor(0.25))])
def test_a_stale_copy_that_kernels_would_read_is_named(attention, name, stale):
    model = torch.nn.ModuleDict({"attn": attention})
    kv_cache_scales.check_copies(model)
    vars(attention)[name] = stale
    attention._parameters.pop(name, None)
    with pytest.raises(
        ValueError, match=rf"^attn\.{name} is {float(stale)}, not 1: kernels would multiply by it in addition to attn\.kv_scales$"
    ):
        kv_cache_scales.check_copies(model)


def test_an_attention_that_rounds_queries_is_refused(attention):
    kv_cache_scales.check_backend(type("FlashInferAttnBackend", (), {})())
    for name in ("FlashAttentionBackend", "TritonAttnBackend", "FlashInferMLAAttnBackend"):
        with pytest.raises(ValueError, match=f"SGLang's {name} is not known to leave queries"):
            kv_cache_scales.check_backend(type(name, (), {})())


@pytest.mark.parametrize(
    "file, line",
    [
        ("srt/layers/attention/flashattention_backend.py", "q = q.to(self.kv_cache_dtype)"),
        ("kernels/ops/attention/extend_attention.py", "qk = tl.dot(q.to(k.dtype), k)"),
        ("kernels/ops/attention/decode_attention.py", "acc += tl.dot(p.to(v.dtype), v)"),
        ("srt/layers/attention/flashinfer_backend.py", "self.q_data_type = model_runner.dtype"),
        ("srt/layers/attention/flashinfer_backend.py", "k_scale=layer.k_scale_float,"),
        ("srt/mem_cache/memory_pool.py", "cache_k = cache_k.to(self.dtype)"),
        ("srt/models/utils.py", "and pool.dtype == torch.bfloat16"),  # writes of keys and values by the rotary embedding's kernel
    ],
)
def test_sglangs_sources_say_what_the_choice_of_a_backend_rests_on(file, line):
    """FA3 and Triton quantize queries or probabilities, FlashInfer does not; a Python copy of the scale goes into graphs."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    assert line in (Path(root) / file).read_text()
