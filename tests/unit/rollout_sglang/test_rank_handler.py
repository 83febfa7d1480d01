"""Live parameters as a sync sees them: by rows, in the memory that the engine computes with."""

from __future__ import annotations

import torch

from parallel.digest import digest, view_bytes
from parallel.shards import Rect
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
