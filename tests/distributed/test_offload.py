"""Optimizer state in host memory between steps. On a CPU both sides are the host: the copies are real, and no bit may change."""

from __future__ import annotations

import json

import pytest
import torch
from support import trainer
from support.models import FP8, random_sequences

BATCHES = [random_sequences(4, seed=seed) for seed in (41, 42, 43)]


BF16 = {**FP8, "high": "bf16"}  # with FP32 masters of their own


@pytest.mark.parametrize("dp, precision", [(1, FP8), (2, BF16)], ids=["one rank, fp32", "a distributed optimizer, bf16"])
def test_training_and_checkpoints_are_the_same_with_the_state_away(worlds, checkpoint, tmp_path, precision, dp):
    with_state, without_state = (
        worlds(dp).call(trainer.train_with_offload, checkpoint, tmp_path / str(offload), precision, BATCHES, offload, dp)
        for offload in (False, True)
    )
    for stays, away in zip(with_state, without_state, strict=True):
        assert_same_with_the_state_away(stays, away)
    for number in range(3):
        states = [json.loads((tmp_path / offload / f"step_{number:05d}" / "state.json").read_text()) for offload in ("False", "True")]
        written = [{name: size for name, size in state["files"].items() if name.endswith(".distcp")} for state in states]
        assert written[0] == written[1] and len(written[0]) > 0


def assert_same_with_the_state_away(stays, away) -> None:
    assert stays["gradients"][0] > 0 and away["gradients"] == [0, 0, 0]
    on_device, on_host = away["addresses"][0::2], away["addresses"][1::2]
    pairs = [pair for before, after in zip(on_device, on_host, strict=True) for pair in zip(before, after, strict=True)]
    assert len(pairs) > 20 and all(before != after for before, after in pairs), "every tensor has moved"
    assert on_host[0] == on_host[1] == on_host[2], "host memory is asked for once"
    assert torch.equal(stays["logprobs"], away["logprobs"]) and stays["weights"] == away["weights"]
