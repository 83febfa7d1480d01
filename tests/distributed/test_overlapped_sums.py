"""Tensor-parallel ranks sum one part of a product's results while they compute the next: the same bits."""

from __future__ import annotations

import pytest
import torch
from support import overlapped_sums
from support.overlapped_sums import WIDTH

from megatron_rl.mcore.layers.overlap import count_parts

CASES = [
    ("row", "deep_gemm", False, 2, 4),
    ("row", "transformer_engine", False, 2, 2),
    ("row", "emulated", True, 2, 4),
    ("row", "emulated", True, 4, 4),
    ("column", "deep_gemm", False, 2, 4),
    ("column", "transformer_engine", False, 2, 2),
    ("column", "emulated", False, 2, 4),
    ("column", "emulated", True, 4, 2),
]


@pytest.mark.parametrize("kind, backend, by_tree, tp, parts", CASES)
def test_forward_dgrad_and_wgrad_have_the_bits_of_the_whole_product(worlds, kind, backend, by_tree, tp, parts):
    for cut, whole in worlds(tp).call(overlapped_sums.with_and_without, kind, backend, by_tree, parts):
        assert whole["events"] == [("start", WIDTH), ("wait", WIDTH)]
        assert cut["events"] == [("start", WIDTH // parts)] * parts + [("wait", WIDTH // parts)] * parts
        for name in ("y", "dx", "dw"):
            assert cut[name].abs().sum() > 0 and torch.equal(cut[name], whole[name]), name


@pytest.mark.parametrize(
    "tokens, width, ranks, parts",
    [
        (8192, 4096, 8, 4),
        (8192, 4096, 1, 1),
        (4096, 4096, 8, 4),
        (2048, 4096, 8, 2),
        (1024, 4096, 8, 1),
        (65536, 384, 2, 1),
        (65536, 768, 2, 2),
    ],
)
def test_a_part_keeps_every_processor_busy(tokens, width, ranks, parts):
    assert count_parts((tokens, width), ranks, True) == parts and count_parts((tokens, width), ranks, False) == 1
