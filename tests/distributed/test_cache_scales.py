"""Scales of an E4M3 cache are those of one process, also if a pipeline stage has no layer with a cache."""

import pytest
import torch
from support.families import parse_layout
from support.models import FP8, random_sequences
from support.trainer import Trainer

from megatron_rl.mcore.weights.cache_scales import collect_scales, renew_scales

KV = FP8 | {"kv": "e4m3_per_layer"}


def choose(folder, layout):
    """Return this rank's scales."""
    trainer = Trainer(folder, KV, layout=layout)
    with renew_scales(trainer.model):
        trainer.actor.compute_logprobs(random_sequences(4, seed=3))
    return collect_scales(trainer.model)


@pytest.mark.parametrize("layout, layers, counts", [("pp2", 2, [0, 1]), ("pp2 vpp2", 4, [0, 2])])
def test_a_stage_of_gated_delta_nets_takes_part(worlds, model_folder, layout, layers, counts):
    folder = model_folder("qwen3_5_text", num_hidden_layers=layers)
    (alone,) = worlds(1).call(choose, folder, parse_layout("tp1"))
    ranks = worlds(2).call(choose, folder, parse_layout(layout))
    assert [len(scales) for scales in ranks] == counts and (ranks[0] | ranks[1]).keys() == alone.keys()
    assert all(torch.equal(scales, alone[name]) and (scales != 1).all() for name, scales in ranks[1].items())
