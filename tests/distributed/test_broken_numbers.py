"""inf and NaN are named and stop a step before anything of the policy changes."""

import pytest
import torch
import torch.distributed as dist
from support.models import FP8, FP32, random_sequences
from support.trainer import Trainer, own

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.errors import RunError
from megatron_rl.mcore.optim.quantizing_optimizer import requantize
from megatron_rl.mcore.weights.load_weights import find_weight_layers
from parallel.formats import MODES
from parallel.layout import Layout

WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"
LINES = {
    "loss": "the loss of optimizer step 2 is nan",
    "gradient": "holds inf or NaN in optimizer step 2",
    "activation": "the first module with inf or NaN in its output is decoder.layers.1.mlp.linear_fc1",
}


def poison_weight(folder, precision, name, layout=None):
    """Write a NaN into one master on every rank that holds it, then quantize. Propagates the error."""
    trainer = Trainer(folder, precision, layout=layout)
    layer = find_weight_layers(trainer.model).get(name)
    if layer is not None and layer.master.values.numel():
        layer.master.values.data[layer.master.values.numel() // 3] = float("nan")
    requantize(trainer.actor.optimizer)


def poison_rollout_weight(folder, precision, name):
    """Write an infinity into one parameter on rank 0, then collect what a sync sends. Propagates the error."""
    trainer = Trainer(folder, precision)
    if dist.get_rank() == 0:
        dict(trainer.model.named_parameters())[name].data[3, 5] = float("inf")
    trainer.collect_named_tensors()


def poison_updates(folder, precision, batch, faults, layout=None):
    """Run updates that are not finite, after a good one: in the "loss", only in the "gradient", or in an "activation". Return for each
    fault the error message and the names whose bytes changed."""
    trainer = Trainer(folder, precision, layout=layout)
    trainer.actor.update(own(batch), negative_log_likelihood)
    before, results = trainer.dump_bytes(), {}
    for fault in faults:
        if fault == "activation":
            layer = trainer.model.decoder.layers[1].mlp.linear_fc1
            layer.register_forward_hook(lambda _, __, output: (output[0] * float("inf"), *output[1:]))
        try:
            trainer.actor.update(own(batch), _POISONED_LOSSES.get(fault, negative_log_likelihood))
            message = ""
        except RunError as error:
            message = str(error)
        after = trainer.dump_bytes()
        results[fault] = message, [name for name in before if before[name] != after[name]]
    return results


def _nan_loss(logprobs, batch):
    total, metrics = negative_log_likelihood(logprobs, batch)
    return total * float("nan"), metrics


def _nan_gradient(logprobs, batch):
    """Return a finite loss with a NaN gradient: sqrt has an infinite slope at 0, and inf * 0 is NaN."""
    total, metrics = negative_log_likelihood(logprobs, batch)
    return total + torch.sqrt(logprobs * 0).sum(), metrics


_POISONED_LOSSES = {"loss": _nan_loss, "gradient": _nan_gradient}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_nan_in_a_weight_is_named_on_every_rank(worlds, checkpoint, layout):
    with pytest.raises(RunError, match=f"{WEIGHT}: weight holds inf or NaN"):
        worlds(layout.world_size).call(poison_weight, checkpoint, FP8, WEIGHT, layout)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.engine and not mode.trainer])
@pytest.mark.parametrize("layer", ["mlp.linear_fc1", "mlp.linear_fc2"])
def test_a_weight_that_is_broken_for_the_engine_is_named_on_every_rank(worlds, checkpoint, mode, layer):
    """It is broken on rank 0 alone; linear_fc2's columns are split, so its INT8 ranks share their maxima."""
    name = f"decoder.layers.1.{layer}.weight"
    with pytest.raises(RunError, match=f"{name}: weight holds inf or NaN"):
        worlds(2).call(poison_rollout_weight, checkpoint, {"mode": mode, "high": "fp32"}, name)


@pytest.mark.parametrize(
    "layout, precision",
    [(Layout(), FP32), (Layout(tp=2), FP8), (Layout(tp=2), FP32), (Layout(pp=2), FP8), (Layout(dp=2), FP8)],
    ids=["one rank, fp32", "tp2, fp8", "tp2, fp32", "pp2, fp8", "dp2, fp8"],
)
def test_an_update_that_is_not_finite_changes_no_byte(worlds, checkpoint, layout, precision):
    faults = [fault for fault in LINES if fault != "activation" or layout.pp == 1]  # the hook is on a layer of the second stage
    for rank_results in worlds(layout.world_size).call(poison_updates, checkpoint, precision, random_sequences(4, seed=3), faults, layout):
        assert list(rank_results) == faults
        for fault, (message, changed) in rank_results.items():
            assert LINES[fault] in message and changed == [], fault
