"""Optimizer state in host memory between steps. On a CPU both sides are the host: the copies are real, and no bit may change."""

import json

import pytest
import torch
from support.models import FP8, random_sequences
from support.trainer import Trainer, compute_logprobs, own

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.mcore.base.master_slices import flatten_chained, iter_masters
from megatron_rl.mcore.checkpoint.optimizer import MOMENTS
from parallel.layout import Layout

BATCHES = [random_sequences(4, seed=seed) for seed in (41, 42, 43)]
BF16 = {**FP8, "high": "bf16"}  # with FP32 masters of their own


def train_with_offload(folder, to, precision, batches, offload, dp=1):
    """Take steps, with the optimizer state offloaded between them if `offload`; compute log-probs and write a checkpoint in between.
    Return bytes of gradients, log-probs, addresses of the state before and after, and the bytes of the weights."""
    trainer = Trainer(folder, precision, {"learning_rate": 3e-3}, layout=Layout(dp=dp))
    actor, offloader = trainer.actor, trainer.actor.offloader
    gradients, logprobs, addresses = [], [], []
    for number, batch in enumerate(batches):
        offloader.reload()
        offloader.reload()
        actor.update(own(batch), PolicyLoss(AlgorithmConfig()))
        addresses.append(_addresses(actor.optimizer))
        if offload:
            offloader.offload()
            offloader.offload()
        addresses.append(_addresses(actor.optimizer))
        gradients.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in offloader.gradient_buffers))
        logprobs.append(torch.cat(compute_logprobs(actor, batch)[0]))
        trainer.save(to / f"step_{number:05d}", number, with_optimizer=True)
    return {"gradients": gradients, "logprobs": torch.cat(logprobs), "addresses": addresses, "weights": trainer.dump_bytes()}


def _addresses(optimizer):
    """Return the data pointers of moments and separate masters."""
    addresses = []
    for part in flatten_chained(optimizer):
        addresses += [state[kind].data_ptr() for state in part.optimizer.state.values() for kind in MOMENTS]
        addresses += [master.data_ptr() for _, master in iter_masters(part)]
    return addresses


@pytest.mark.parametrize("dp, precision", [(1, FP8), (2, BF16)], ids=["one rank, fp32", "a distributed optimizer, bf16"])
def test_training_and_checkpoints_are_the_same_with_the_state_away(worlds, checkpoint, tmp_path, precision, dp):
    with_state, without_state = (
        worlds(dp).call(train_with_offload, checkpoint, tmp_path / str(offload), precision, BATCHES, offload, dp)
        for offload in (False, True)
    )
    for stays, away in zip(with_state, without_state, strict=True):
        assert_same_with_the_state_away(stays, away)
    for number in range(3):
        states = [json.loads((tmp_path / offload / f"step_{number:05d}" / "state.json").read_text()) for offload in ("False", "True")]
        written = [{name: size for name, size in state["files"].items() if name.endswith(".distcp")} for state in states]
        assert written[0] == written[1] and len(written[0]) > 0


def assert_same_with_the_state_away(stays, away):
    assert stays["gradients"][0] > 0 and away["gradients"] == [0, 0, 0]
    on_device, on_host = away["addresses"][0::2], away["addresses"][1::2]
    pairs = [pair for before, after in zip(on_device, on_host, strict=True) for pair in zip(before, after, strict=True)]
    assert len(pairs) > 20 and all(before != after for before, after in pairs), "every tensor has moved"
    assert on_host[0] == on_host[1] == on_host[2], "host memory is asked for once"
    assert torch.equal(stays["logprobs"], away["logprobs"]) and stays["weights"] == away["weights"]
