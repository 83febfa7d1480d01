"""The engine's attention in splits: prompts behind a prefix and decoded tokens read a cache by the tables of the pinned SGLang."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from support.kernel_tests import random
from support.sglang_signatures import read_function

from megatron_rl.kernels.split_attention import pack
from megatron_rl.kernels.split_attention.reference import attend
from rollout_sglang.hooks import split_attention
from rollout_sglang.server_options import find_sglang_folder

BACKEND = "srt/layers/attention/triton_backend"
HEADS, GROUPS, WIDTH = 4, 2, 64


def make_backend(slots, **changes):
    """Return a backend with a cache of two requests, in rows 2 and 1 of the table, as SGLang's constructor leaves it."""
    caches = [torch.full((40, GROUPS, WIDTH), 7.0) for _ in "kv"]
    pool = SimpleNamespace(get_key_buffer=lambda _: caches[0], get_value_buffer=lambda _: caches[1])

    def write(batch, layer, where, k, v):
        for cache, x in zip(caches, (k, v), strict=True):
            cache[where.long()] = x.view(-1, GROUPS, WIDTH)

    kept = {
        "req_to_token": slots,
        "req_to_token_pool": SimpleNamespace(size=2),
        "token_to_kv_pool": pool,
        "max_context_len": slots.shape[1],
    }
    flags = {"use_mla": False, "use_sliding_window_kv_pool": False, "page_size": 1, "dcp_size": 1, "dllm_attention": None}
    translator = SimpleNamespace(is_translating=changes.pop("is_translating", False))
    fields = {**kept, **flags, **changes, "kv_index_translator": translator, "device": "cpu", "_set_kv_buffer": write}
    backend = SimpleNamespace()
    split_attention.start(lambda self, **_: vars(self).update(fields), backend)
    return backend


def make_layer(**changes):
    sizes = {"layer_id": 0, "tp_q_head_num": HEADS, "qk_head_dim": WIDTH, "scaling": WIDTH**-0.5, "sliding_window_size": -1}
    kind = {"logit_cap": 0.0, "k_scale": None, "is_cross_attention": False, "attn_type": SimpleNamespace(value="decoder")}
    return SimpleNamespace(**{**sizes, **kind, "xai_temperature_len": -1, **changes})


@pytest.mark.parametrize("window, sinks", [(0, False), (5, True)])
def test_chunks_and_decoded_tokens_attend_to_their_requests(monkeypatch, window, sinks):
    monkeypatch.setattr(split_attention, "_locate_writes", lambda batch: batch.out_cache_loc)
    lengths, layer = (9, 14), make_layer(sliding_window_size=window - 1 if window else -1)
    starts = torch.tensor([0, 9, 23])
    q, k, v = (random(23, count, WIDTH, seed=seed) for seed, count in enumerate((HEADS, GROUPS, GROUPS)))
    beside = random(HEADS, seed=5) if sinks else None
    whole, _ = attend(q, k, v, pack(starts, 14, 23), WIDTH**-0.5, beside, window)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:32].int().view(2, 16)
    backend = make_backend(torch.cat([torch.zeros(1, 16, dtype=torch.int32), slots.flip(0)]))
    rows = [slots[0, :9], slots[1, :14]]

    def run(function, places):
        """Pass the tokens of these places of both requests."""
        taken = torch.cat([torch.arange(start, start + n)[place] for start, n, place in zip((0, 9), lengths, places, strict=True)])
        new = torch.tensor([0, *(len(range(n)[place]) for n, place in zip(lengths, places, strict=True))]).cumsum(0)
        seen = torch.tensor([range(n)[place][-1] + 1 for n, place in zip(lengths, places, strict=True)])
        where = torch.cat([row[place] for row, place in zip(rows, places, strict=True)])
        backend.forward_metadata = SimpleNamespace(qo_indptr=new, max_extend_len=int(new.diff().max()))
        batch = SimpleNamespace(seq_lens=seen, req_pool_indices=torch.tensor([2, 1]), out_cache_loc=where, spec_info=None)
        found = function(backend, q[taken].flatten(1), k[taken].flatten(1), v[taken].flatten(1), layer, batch, sinks=beside)
        torch.testing.assert_close(found, whole[taken].flatten(1), rtol=1e-5, atol=1e-5)

    run(split_attention.extend, (slice(0, 4), slice(0, 12)))
    run(split_attention.extend, (slice(4, 8), slice(12, 13)))
    run(split_attention.decode, (slice(8, 9), slice(13, 14)))


def test_what_the_kernel_does_not_read_is_refused():
    slots = torch.zeros(3, 16, dtype=torch.int32)
    for change in ({"use_mla": True}, {"use_sliding_window_kv_pool": True}, {"page_size": 64}, {"dcp_size": 2}, {"is_translating": True}):
        with pytest.raises(NotImplementedError, match="precision.reduction"):
            make_backend(slots, **change)
    backend, x = make_backend(slots), torch.zeros(2, HEADS * WIDTH)
    backend.forward_metadata = SimpleNamespace(qo_indptr=None, max_extend_len=1)
    batch = SimpleNamespace(seq_lens=torch.ones(2), spec_info=None)
    bidirectional = SimpleNamespace(value="decoder_bidirectional")
    for layer in (
        make_layer(logit_cap=30.0),
        make_layer(k_scale=x),
        make_layer(attn_type=bidirectional),
        make_layer(xai_temperature_len=8),
    ):
        with pytest.raises(NotImplementedError, match="precision.reduction"):
            split_attention.extend(backend, x, x, x, layer, batch)
    with pytest.raises(NotImplementedError, match="score_mod in attention"):
        split_attention.decode(backend, x, x, x, make_layer(), batch, score_mod=len)
    with pytest.raises(NotImplementedError, match="a draft"):
        split_attention.decode(backend, x, x, x, make_layer(), SimpleNamespace(seq_lens=torch.ones(2), spec_info=1))


def test_the_pinned_sglang_has_what_the_hooks_use():
    for name, hook in (("forward_extend", split_attention.extend), ("forward_decode", split_attention.decode)):
        theirs, ours = (list(inspect.signature(each).parameters) for each in (read_function(BACKEND, name), hook))
        assert theirs[: len(ours) - 1] == ours[:-1] and "sinks" in theirs
    source = (find_sglang_folder() / f"{BACKEND}.py").read_text()
    names = ("use_mla", "use_sliding_window_kv_pool", "page_size", "dcp_size", "kv_index_translator", "req_to_token", "max_context_len")
    assert all(f"self.{name} = " in source for name in (*names, "req_to_token_pool", "token_to_kv_pool", "device"))
    assert "def _set_kv_buffer(" in source and "qo_indptr: torch.Tensor" in source and "max_extend_len: int" in source
