"""A live engine that reports right log-probs but draws other tokens: each fault is named by the token that the trainer draws instead."""

from dataclasses import replace
from functools import partial

import planted_server
import pytest
import torch
from support import trainer_engine
from support.faulty_draws import TEMPERATURE
from support.models import FP8, random_sequences
from support.processes import World
from support.trainer import own
from support.trainer_engine import current

from megatron_rl.batch.draws import mark_draws
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.draws import DrawCheck
from megatron_rl.errors import RunError
from megatron_rl.mcore.base.names import override
from megatron_rl.rollout.engine import hash_seed
from parallel.layout import Layout

PROMPTS = [sample.prompt_ids for sample in random_sequences(8, seed=31)]
TOKENS, FILTERS = 24, {"top_k": 100, "top_p": 0.95, "min_p": 0.1}
PLAIN = ("temperature twice", "biased token", "greedy", "one seed", "one number", "penalty", "banned token", "previous distribution")
FILTERED = ("kept set off by one", "reported set off by one", "min-p ignored")


def sample_and_check(filters):
    """Sample on the engine, score on the trainer, and check the draws. Return the metrics."""
    served, told = current(), []
    config = Config.model_validate(served.config.model_dump() | {"rollout": {"temperature": TEMPERATURE, **filters}})
    sampling = config.rollout.to_sampling()
    samplings = [replace(sampling, max_new_tokens=TOKENS, seed=hash_seed(number)) for number in range(len(PROMPTS))]
    samples = []
    for number, answer in enumerate(served.engines.generate(PROMPTS, samplings)):
        seeds = torch.tensor([len(answer.output_ids_T), answer.seed])
        samples.append(TrainingSample(PROMPTS[number], answer.output_ids_T, kept_tokens=answer.kept_tokens, seeds=seeds, number=number))
    mark_draws(samples, 0)
    actor = served.trainer.actor
    with override([actor], "temperature", TEMPERATURE), actor.record_draws() as record:
        actor.compute_logprobs(own(samples))
    return DrawCheck(config, True, told.append).check(record, own(samples), 0.0)


def test_every_fault_of_the_draws_is_named(tmp_path):
    fault = tmp_path / "fault"
    with World(1, tmp_path / "world") as world:
        world.call(planted_server.launch_planted, fault)
        world.call(partial(trainer_engine.start_architecture, "qwen3", tmp_path, FP8, Layout(), {}, True))
        world.call(trainer_engine.sync, 0)
        for filters in ({}, FILTERS):
            metrics = world.call(sample_and_check, filters)[0]
            assert metrics["draws/other"] == metrics["draws/filtered"] == metrics["draws/failed"] == 0 and metrics["draws/checked"] > 100
        for name in PLAIN + FILTERED:
            planted_server.set_fault(fault, name)
            line = r"^draws/other: \d+ of \d+ tokens are not those of their seeds: at position \d+ of sample \d+"
            if name in FILTERED[1:]:
                line = r"^draws/filtered: the kept tokens of \d+ tokens are wrong: sample \d+, position \d+: "
            with pytest.raises(RunError, match=line) as raised:
                world.call(sample_and_check, FILTERS if name in FILTERED else {})
            print(f"\n{name}: {raised.value}", end="")
        planted_server.set_fault(fault, "greedy")
        with pytest.raises(
            RunError, match=r"^the canary fails: engine 0, prompt 0, position 4[89]: the engine sampled token \d+, .* give \d+$"
        ):
            world.call(trainer_engine.sync, 1, 1 << 20, {"canary": 2})
