"""A weight that was not made anew from its master is named, in every format and on every replica, though both sides hold the same bytes."""

import re

import pytest
import torch
from support.models import FP8, make_bf16_checkpoint, random_sequences
from support.trainer import Trainer, own

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.errors import RunError
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.optim.buckets import finish_gathers
from megatron_rl.mcore.optim.master_check import check_masters
from parallel.layout import Layout

MODES = {
    "fp8": FP8,
    "fp32 scales": FP8 | {"scale_format": "fp32"},
    "int8": {"mode": "int8_rollout", "high": "bf16"},
    "bf16": {"mode": "bf16"},
}
LAYER = "decoder.layers.0.self_attention.linear_proj.weight"

MODULE = LAYER.removesuffix(".weight")


def find_stale(folder, precision, layout, turns):
    """Take steps, and leave one weight or one scale as it was before. Return what the checks say: of right weights, then by step."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-2}, layout=layout)
    parameters, layers = dict(trainer.model.named_parameters()), find_quantized_layers(trainer.model)

    def step(seed):
        trainer.actor.update(own(random_sequences(4, seed)), negative_log_likelihood)

    def check(number):
        try:
            check_masters(trainer.model, trainer.actor.optimizer, number)
        except RunError as error:
            return str(error)
        return ""

    step(1)
    said, weight = [check(0)], parameters[LAYER]
    before, scale = weight.detach().clone(), layers[MODULE].scale.clone() if MODULE in layers else None
    step(2)
    finish_gathers(trainer.model)  # or the gather of this step could still write to the weight
    with torch.no_grad():
        weight.copy_(before)
    if scale is not None:
        layers[MODULE].set_scale(scale)
    said += [next(filter(None, map(check, range(turns))), "")]
    step(3)
    said += [check(number) for number in range(turns)]
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            weight.view(-1)[:7] = before.view(-1)[:7]  # of rank 0's slice, as after a lost gather
    return said, check(0)


@pytest.mark.parametrize("mode", MODES)
def test_a_stale_weight_is_named(worlds, tmp_path_factory, mode):
    folder = make_bf16_checkpoint(tmp_path_factory.mktemp("model"))
    for said, lost in worlds(2).call(find_stale, folder, MODES[mode], Layout(dp=2), 1):
        assert said[0] == said[2] == "" and re.match(rf"{re.escape(LAYER)}.* not made from .*FP32 master", said[1]), said
        assert lost.startswith(f"{LAYER}: replicas hold other weights")
