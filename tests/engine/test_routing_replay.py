"""A high-precision trainer with an FP8 engine with experts: the engine is proved, computes as the contract says, and records the experts
of each token, which the trainer replays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import engine_checks, trainer_engine
from support.models import make_checkpoint, random_sequences
from support.processes import alive_after, command_lines, family

WIDTHS = {"num_hidden_layers": 2, "initializer_range": 0.05}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PRECISION = {"mode": "fp8_rollout", "high": "fp32"}
PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(12, seed=23)]


@pytest.fixture(scope="module")
def world(new_world, tmp_path_factory):
    """A trainer and its engine. The tests share them in order."""
    world, checkpoint = new_world(), make_checkpoint(tmp_path_factory.mktemp("model"), **WIDTHS, **EXPERTS)
    routing = {"algorithm": {"routing_replay": "engine"}}
    world.call(trainer_engine.start, checkpoint, tmp_path_factory.mktemp("engine"), PRECISION, routing)
    return world


@pytest.fixture(scope="module")
def answered(world):
    """Two-turn responses of a random model in a mode in which trainer and engine differ, and the log-probs of both."""
    samples, same, cached = world.call(engine_checks.generate_two_turns, PROMPTS)[0]
    return samples, same, cached, world.call(engine_checks.score, samples)[0]


def distance(logprobs: dict, name: str) -> torch.Tensor:
    return (logprobs[name] - logprobs["engine"]).abs()


def test_an_fp8_engine_below_a_high_precision_trainer_passes_all_checks_after_a_sync(world):
    world.call(trainer_engine.check_live)
    report = world.call(trainer_engine.sync, 1, 1 << 20, {"canary": 2})[0]
    assert report["canary"] == 0.0  # the trainer multiplies as the engine does, and sends the tokens to the engine's experts
    assert world.call(trainer_engine.prove) == [report["proved"]] == [report["tensors"]]
    _, _, rollout = world.call(trainer_engine.compare_graphs)[0]
    quantized = {str(edge.format) for edge in rollout.edges if edge.format.quantized}
    assert quantized == {"e4m3 128x128 pow2", "e4m3 1x128 pow2"}


def test_the_record_is_that_of_every_token(answered):
    """The trainer's model with the engine's products has the engine's bits, so it routes every token as the engine did: tokens of
    prompts, responses and environments, and those that the second turn took from the prefix cache."""
    samples, same, cached, logprobs = answered
    assert all(
        sample.routed_experts.shape == (sample.length - 1, 2, 2) and sample.routed_experts.dtype == torch.uint8 for sample in samples
    )
    assert same and cached > 12 * len(PROMPTS)
    assert len(torch.cat([sample.routed_experts for sample in samples]).unique()) == 8
    assert logprobs["emulated differs"] == 0 and distance(logprobs, "emulated").max() == 0


def test_agents_get_the_record_of_every_token_too(world):
    agents = world.call(engine_checks.sample_by_agents, 4, 40, 1)[0]
    assert agents["errors"] == [""] * 4 and all(agents["same"]) and all(agents["held"])
    assert len(agents["routed"]) == 8 and all(map(np.array_equal, agents["routed"], agents["direct routed"]))


def test_replay_brings_the_mismatch_down_to_that_of_a_dense_model(answered, world, tmp_path_factory):
    samples, _, _, logprobs = answered
    assert logprobs["free differs"] >= logprobs["replay differs"] > 0  # another expert in one layer leads to others in the next
    assert distance(logprobs, "replay").mean() < 0.8 * distance(logprobs, "free").mean()
    assert distance(logprobs, "replay").max() < 0.5 * distance(logprobs, "free").max()  # a token at another expert is far off
    dense = make_checkpoint(tmp_path_factory.mktemp("dense"), **WIDTHS, intermediate_size=256)  # as wide as two experts
    assert distance(logprobs, "replay").mean() <= world.call(engine_checks.measure_dense_mismatch, dense, PRECISION, samples)[0]


def test_everything_ends_by_itself_when_the_trainer_is_killed_while_requests_run(world):
    """This is the last test, because nothing is left after it."""
    trainer, *engine = family(world.pid())
    assert len(engine) >= 3  # server, scheduler, detokenizer
    world.send(trainer_engine.generate_until_it_fails, PROMPTS)
    trainer.kill()
    assert command_lines(alive_after(engine, 120)) == {}
