"""BF16 products of DeepGEMM, on a stand-in that checks layouts, and its deterministic mode at the start of a process."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries
from support.kernel_tests import random

from megatron_rl.errors import RunError
from megatron_rl.kernels import plain


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(plain, "_shared", False)
    fake_gpu_libraries.install(monkeypatch)
    return sys.modules["deep_gemm"]


def test_rows_and_weights_of_any_layout_are_multiplied(library):
    x, weight = random(4, 3, 64, seed=0, dtype=torch.bfloat16), random(24, 64, seed=1, dtype=torch.bfloat16)
    wanted = (x.float() @ weight.float().t()).bfloat16()
    wide = torch.zeros(4, 3, 73, dtype=torch.bfloat16)[..., 9:].copy_(x)  # neither rows nor addresses are aligned
    for given in (x, wide, x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(plain.multiply(given, weight), wanted)
    assert torch.equal(plain.multiply(x, weight.t().contiguous().t()), wanted)
    odd = plain.multiply(x[0], weight[:21])
    assert odd.is_contiguous() and torch.equal(odd, wanted[0, :, :21]) and plain.multiply(x[:0], weight).shape == (0, 3, 24)


def test_a_process_starts_in_the_deterministic_mode_or_not_at_all(library, monkeypatch):
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert not plain.takes(x, x)
    with pytest.raises(RunError, match="has no deterministic mode, so its order of sums is not known"):
        plain.share_products()
    assert not plain.takes(x, x)
    modes = []
    monkeypatch.setattr(library, "use_deterministic_algorithms", modes.append, raising=False)
    monkeypatch.setattr(library, "get_deterministic_algorithms", lambda: modes[-1], raising=False)
    plain.share_products()
    assert modes == [True] and plain.takes(x, x)
    assert not plain.takes(x, SimpleNamespace(dtype=torch.float32)) and not plain.takes(torch.zeros(1).bfloat16(), x)
    modes.append(False)
    with pytest.raises(RunError, match="deterministic mode"):
        plain.check_mode()
