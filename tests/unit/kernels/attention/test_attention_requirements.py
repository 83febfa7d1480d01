"""Packed attention on a GPU names what the installed torch lacks, before the first forward pass."""

import sys

import pytest
import torch

from megatron_rl.kernels.attention import reference
from megatron_rl.kernels.attention.requirements import find_attention_problem


def of_torch_2_9(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...


def without_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)): ...


def test_the_tested_torch_has_all_that_the_call_passes(monkeypatch):
    assert find_attention_problem() == ""
    passed = {}
    monkeypatch.setattr(reference, "varlen_attn", lambda q, k, v, *_, **named: passed.update(named) or v)
    query, key = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    reference.flash_attention(query, key, key, torch.tensor([0, 4], dtype=torch.int32), 4, None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None)
    assert find_attention_problem().endswith(f"does not accept {', '.join(passed)}")


@pytest.mark.parametrize("function, lacking", [(of_torch_2_9, "scale, window_size, enable_gqa"), (without_groups, "enable_gqa")])
def test_an_older_torch_is_refused_by_what_it_lacks(monkeypatch, function, lacking):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    assert find_attention_problem() == f"varlen_attn of torch {torch.__version__} does not accept {lacking}"


def test_a_torch_without_packed_attention_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert find_attention_problem() == f"torch {torch.__version__} has no varlen_attn"
