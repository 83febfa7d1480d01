"""Hooks on SGLang's start: forked children, and dummy weights."""

from __future__ import annotations

import gc
import multiprocessing

import torch

from rollout_sglang.hooks.startup import fork_children, make_up_weights


def test_children_are_forked_whatever_sglang_asked_for():
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        fork_children(lambda method: multiprocessing.set_start_method(method, force=True), "spawn")
        assert multiprocessing.get_start_method() == "fork" and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        multiprocessing.set_start_method(before, force=True)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.tied = torch.nn.Parameter(torch.zeros(2, 2))
        self.attn = torch.nn.Module()
        self.attn.k_scale, self.attn.kv_scales = torch.nn.Parameter(torch.tensor(-1.0)), torch.nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(3.0))


def test_buffers_and_scales_of_the_cache_stay_and_weights_are_made_up():
    def fill(model: torch.nn.Module, value: float) -> None:
        for tensor in model.state_dict().values():
            tensor.fill_(value)

    model = Model()
    make_up_weights(fill, model, 7.0)
    assert (
        model.attn.k_scale == -1
        and (model.attn.kv_scales == 1).all()
        and model.table.tolist() == [0, 1, 2]
        and (model.weight == 7).all()
        and model.tied is model.weight
    )
