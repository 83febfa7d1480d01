"""A real engine records which experts served each token, and the trainer sends the tokens to the same ones."""

from __future__ import annotations

import pytest
import torch
from support.models import make_checkpoint, random_sequences

pytestmark = pytest.mark.slow

WIDTHS = {"num_hidden_layers": 2, "initializer_range": 0.05}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PRECISION = {"mode": "fp8_rollout", "high": "fp32"}
PROMPTS = [sequence.prompt_ids for sequence in random_sequences(12, seed=23)]


@pytest.fixture(scope="module")
def world(new_world):
    return new_world()


@pytest.fixture(scope="module")
def answered(world, tmp_path_factory):
    """Answers of two turns by a random model, in a mode in which trainer and engine differ, and what both say of them."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"), **WIDTHS, **EXPERTS)
    world.call("support.routing:start", checkpoint, tmp_path_factory.mktemp("engine"), PRECISION, seconds=270)
    sequences, same, cached = world.call("support.routing:two_turns", PROMPTS)[0]
    return sequences, same, cached, world.call("support.routing:logprobs", sequences)[0]


def apart(found: dict, name: str) -> torch.Tensor:
    return (found[name] - found["engine"]).abs()


def test_the_record_is_that_of_every_token(answered):
    """The trainer's model with the engine's products computes the engine's bits, so by itself it sends every token where the engine did:
    those of prompts, of answers, of an environment, and those that the second turn took from the prefix cache."""
    sequences, same, cached, found = answered
    assert all(
        sequence.routed_experts.shape == (sequence.length - 1, 2, 2) and sequence.routed_experts.dtype == torch.uint8
        for sequence in sequences
    )
    assert same and cached > 0
    assert len(torch.cat([sequence.routed_experts for sequence in sequences]).unique()) == 8
    assert found["emulated differs"] == 0 and apart(found, "emulated").max() == 0


def test_replay_brings_the_mismatch_down_to_that_of_a_dense_model(answered, world, tmp_path_factory):
    sequences, _, _, found = answered
    assert found["free differs"] >= found["replay differs"] > 0  # another expert in one layer leads to others in the next
    assert apart(found, "replay").mean() < 0.8 * apart(found, "free").mean()
    assert apart(found, "replay").max() < 0.5 * apart(found, "free").max()  # a token at another expert is far off
    dense = make_checkpoint(tmp_path_factory.mktemp("dense"), **WIDTHS, intermediate_size=256)  # as wide as two experts
    assert apart(found, "replay").mean() <= world.call("support.routing:dense_mismatch", dense, PRECISION, sequences)[0]
