"""Attention of prompts in the engine: requests of similar lengths share a batch, and each keeps its bits."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.kernels import batch_invariant
from rollout_sglang.hooks import cpu_kernels

REQUESTS = [(11, 11), (11, 11), (5, 5), (12, 1), (31, 17), (33, 33), (64, 2), (70, 40), (11, 11), (1, 1)]  # length and new tokens
SLOTS, HEADS, GROUPS, WIDTH = 512, 4, 2, 16


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("keys_at_once", [1 << 14, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_requests_bits_do_not_depend_on_the_batch(monkeypatch, window, keys_at_once, threads):
    monkeypatch.setattr(cpu_kernels, "_KEYS_PER_THREAD", 64)
    monkeypatch.setattr("megatron_rl.precision.threads._thread_counts", [threads])
    monkeypatch.setattr(cpu_kernels, "_KEYS_AT_ONCE", keys_at_once)
    monkeypatch.setattr(cpu_kernels.batch_invariant, "attention", counted := Counted())
    torch.manual_seed(0)
    lengths, new = (torch.tensor(values) for values in zip(*REQUESTS, strict=True))
    query = torch.randn(int(new.sum()), HEADS, WIDTH)
    keys, values = torch.randn(2, SLOTS, GROUPS, WIDTH)
    table = torch.randint(1, SLOTS, (2 * len(REQUESTS), 128), dtype=torch.int32)
    rows = torch.randperm(len(table))[: len(REQUESTS)]
    sinks = torch.randn(HEADS) if window else None
    got = torch.full_like(query, torch.nan)
    backend = SimpleNamespace(sinks=sinks)
    given = query, got, keys, values, table, rows, lengths, (lengths - new).int(), new.int()
    cpu_kernels.run_extend_attention(backend, *given, sliding_window_size=window - 1)
    assert counted.calls == (7 if keys_at_once == 64 else 5 if threads == 1 else 6), "threads share the six shortest requests"
    for row, start, (length, tokens) in zip(rows, accumulate(new.tolist(), initial=0), REQUESTS, strict=False):
        slots, own = table[row, :length].long(), query[start : start + tokens].transpose(0, 1)[None]
        last, cache = torch.arange(length - tokens, length)[None], (keys[slots].transpose(0, 1)[None], values[slots].transpose(0, 1)[None])
        alone = ATTENTION(own, *cache, last, WIDTH**-0.5, sinks, window)[0].transpose(0, 1)
        assert torch.equal(got[start : start + tokens], alone)


ATTENTION = batch_invariant.attention


class Counted:
    calls = 0

    def __call__(self, *args):
        self.calls += 1
        return ATTENTION(*args)
