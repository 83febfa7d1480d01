"""Optimizer state that waits in host memory between steps. On a CPU both sides are the host: the copies are real, and no bit may change."""

from __future__ import annotations

import json

import pytest
import torch
from support import trainer
from support.models import FP8, random_sequences

BATCHES = [random_sequences(4, seed=seed) for seed in (41, 42, 43)]


@pytest.mark.parametrize("dp", [1, 2], ids=["one rank", "a distributed optimizer"])
@pytest.mark.parametrize("precision", [FP8, {**FP8, "high": "bf16"}], ids=["fp32", "bf16 with masters of their own"])
def test_training_and_checkpoints_are_the_same_with_the_state_away(one, two, checkpoint, tmp_path, precision, dp):
    stay, go = (
        (one, two)[dp - 1].call(trainer.train, checkpoint, tmp_path / str(offload), precision, BATCHES, offload, dp)
        for offload in (False, True)
    )
    for stays, away in zip(stay, go, strict=True):
        assert_same_with_the_state_away(stays, away)
    for number in range(3):
        states = [json.loads((tmp_path / offload / f"step_{number:05d}" / "state.json").read_text()) for offload in ("False", "True")]
        written = [{name: told for name, told in state["files"].items() if name.endswith(".distcp")} for state in states]
        assert written[0] == written[1] and len(written[0]) > 0


def assert_same_with_the_state_away(stays, away) -> None:
    assert stays["gradients"][0] > 0 and away["gradients"] == [0, 0, 0]
    here, there = away["addresses"][0::2], away["addresses"][1::2]
    pairs = [pair for before, after in zip(here, there, strict=True) for pair in zip(before, after, strict=True)]
    assert len(pairs) > 20 and all(before != after for before, after in pairs), "every tensor has moved"
    assert there[0] == there[1] == there[2], "host memory is asked for once"
    assert torch.equal(stays["logprobs"], away["logprobs"]) and stays["held"] == away["held"]
