"""Weights that SGLang makes up leave alone what no sync would replace."""

from __future__ import annotations

import torch

from rollout_sglang.hooks.startup import make_up_weights


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
