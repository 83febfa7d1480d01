"""A high-precision trainer with an FP8 engine with experts, which records the experts of each token that the trainer replays."""

from dataclasses import replace

import engine_checks
import numpy as np
import pytest
import torch
from support import trainer_engine
from support.models import make_checkpoint, random_sequences
from support.processes import alive_after, command_lines, family
from support.trainer import Trainer
from support.trainer_engine import current, join_logprobs

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.mcore.engine_emulation import emulate_engine

WIDTHS = {"num_hidden_layers": 2, "initializer_range": 0.05}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PRECISION = {"mode": "fp8_rollout", "high": "fp32"}
PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(12, seed=23)]
ENVIRONMENT_IDS = [7, 8, 9]
"""What an environment says between two turns."""


def generate_two_turns(prompts, tokens=12):
    """Return samples of two turns with the engine's log-probs and routing, whether each second record begins with the first, and how
    many tokens the second turns took from the prefix cache."""
    first = current().sample(prompts, tokens)
    longer = [[*prompt, *answer.output_ids_T.tolist(), *ENVIRONMENT_IDS] for prompt, answer in zip(prompts, first, strict=True)]
    second = current().sample(longer, tokens)
    samples, same = [], True
    for prompt, turn, next_turn in zip(prompts, first, second, strict=True):
        logprobs = join_logprobs([turn, next_turn])
        sampled = [True] * len(turn.output_ids_T) + [False] * len(ENVIRONMENT_IDS) + [True] * len(next_turn.output_ids_T)
        same &= bool((next_turn.routed_experts_T[: len(turn.routed_experts_T)] == turn.routed_experts_T).all())
        experts = extend_routing_record(turn.routed_experts_T, next_turn.routed_experts_T)
        ids = [*turn.output_ids_T.tolist(), *ENVIRONMENT_IDS, *next_turn.output_ids_T.tolist()]
        current().trainer.actor.routing.shape.check(experts, len(prompt) + len(ids), "an answer")
        record = {"response_mask": sampled, "routed_experts": torch.from_numpy(experts)}
        samples.append(TrainingSample(prompt, ids, rollout_logprobs=logprobs, **record))
    return samples, same, sum(turn.cached_tokens for turn in second)


def score(samples):
    """Return the log-probs of all sampled tokens by the engine, by the trainer with replay (`replay`) and without (`free`), and by the
    trainer's model with the engine's products without replay (`emulated`); and for the last three the share of tokens whose experts
    differ from the engine's."""
    trainer = current().trainer
    routing, results = trainer.actor.routing, {"engine": torch.cat([sample.rollout_logprobs for sample in samples])}

    def compute(name):
        with routing.collect_stats(samples) as stats:
            results[name] = current().compute_logprobs(samples)
        results[f"{name} differs"] = stats.gather_metrics()["router/differs"]

    compute("replay")
    with routing.disable_replay():
        compute("free")
        with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.engine_format):
            compute("emulated")
    return results


def measure_dense_mismatch(checkpoint, precision, samples):
    """Return the mean |difference| of log-probs between a dense model and the same model with its engine's products."""
    trainer = Trainer(checkpoint, precision)
    plain = [replace(sample, routed_experts=torch.empty(0)) for sample in samples]
    own = torch.cat(trainer.actor.compute_logprobs(plain)[0])
    with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.engine_format):
        return float((torch.cat(trainer.actor.compute_logprobs(plain)[0]) - own).abs().mean())


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
    samples, same, cached = world.call(generate_two_turns, PROMPTS)[0]
    return samples, same, cached, world.call(score, samples)[0]


def distance(logprobs, name):
    return (logprobs[name] - logprobs["engine"]).abs()


def test_an_fp8_engine_below_a_high_precision_trainer_passes_all_checks_after_a_sync(world):
    world.call(trainer_engine.check_live)
    report = world.call(trainer_engine.sync, 1, 1 << 20, {"canary": 2})[0]
    assert report["canary"] == 0.0  # the trainer multiplies as the engine does, and sends the tokens to the engine's experts
    assert world.call(trainer_engine.prove) == [report["proved"]] == [report["tensors"]]
    _, _, rollout = world.call(trainer_engine.compare_graphs)[0]
    quantized = {str(edge.format) for edge in rollout.edges if edge.format.granularity}
    assert quantized == {"e4m3 128x128 pow2", "e4m3 1x128 pow2"}


def test_the_record_is_that_of_every_token(answered):
    """The trainer's model with the engine's products has the engine's bits, so it routes every token as the engine did: tokens of
    prompts, responses and environments, and those that the second turn took from the prefix cache."""
    samples, same, cached, logprobs = answered
    assert all(sample.routed_experts.shape == (sample.length - 1, 2, 2) for sample in samples)
    assert {sample.routed_experts.dtype for sample in samples} == {torch.uint8}
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
    assert distance(logprobs, "replay").mean() <= world.call(measure_dense_mismatch, dense, PRECISION, samples)[0]


def test_everything_ends_by_itself_when_the_trainer_is_killed_while_requests_run(world):
    """This is the last test, because nothing is left after it."""
    trainer, *engine = family(world.pid())
    assert len(engine) >= 3  # server, scheduler, detokenizer
    world.send(trainer_engine.generate_until_it_fails, PROMPTS)
    trainer.kill()
    assert command_lines(alive_after(engine, 120)) == {}
