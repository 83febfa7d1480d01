"""Sampling by a real engine: top_k, top_p and min_p depend only on the completion's seed, and stop strings end a response."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from support import trainer_engine
from support.models import random_sequences
from support.trainer_engine import current

from examples.arithmetic.byte_tokenizer import SPECIAL_TOKENS
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.rewards.thinking import decode_completion
from megatron_rl.rollout.engine import Abort
from megatron_rl.types import SamplingParams

pytestmark = pytest.mark.xdist_group("unified")  # they share an engine

PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(8, seed=11)]
TOKENS = 24


def abort_generation(prompts, tokens):
    """Abort a generation, later and later until SGLang has read the requests. Return its error, and (finish reason, tokens) of each of
    the engine's answers."""
    engine, answers = current().engines.replicas[0].engine, []
    ask = engine._ask

    def recording(*arguments):
        answers[:] = ask(*arguments)
        return answers

    with mock.patch.object(engine, "_ask", recording), ThreadPoolExecutor(1) as pool:
        for attempt in range(20):
            abort = Abort()
            asking = pool.submit(current().engines.generate, prompts, SamplingParams(1.0, tokens), abort)
            time.sleep(0.05 * 1.3**attempt)
            abort.request()
            error = repr(asking.exception())
            ended = [(answer.finish, len(answer.ids) // 4) for answer in answers]
            if any(reason == "abort" and count for reason, count in ended):
                break
    return error, ended


def sample(world, *samplings):
    """Return the responses to all prompts for each way of sampling, all in one batch. Every prompt has its own seed."""
    asked = [replace(sampling, seed=seed) for sampling in samplings for seed in range(len(PROMPTS))]
    answers = world.call(trainer_engine.ask, "engines.generate", PROMPTS * len(samplings), asked)[0]
    return [answers[start : start + len(PROMPTS)] for start in range(0, len(answers), len(PROMPTS))]


def tokens(answers):
    return [answer.output_ids_T.tolist() for answer in answers]


def test_bounds_hold_for_their_request_alone_and_one_token_is_the_greedy_one(unified):
    plain = SamplingParams(1.0, TOKENS)
    ways = (plain, replace(plain, temperature=0.0), replace(plain, top_k=1), replace(plain, top_p=1e-6), replace(plain, min_p=0.999999))
    free, greedy, *others = sample(unified, *ways)
    assert tokens(greedy) == tokens(others[0]) == tokens(others[1]) == tokens(others[2]) != tokens(free)
    assert not any(answer.logprobs_T.any() for answer in others[1] + others[2]), "what is certain has a log-prob of 0"
    assert tokens(sample(unified, ways[1])[0]) == tokens(greedy), "in a batch that is all greedy, too"
    cut = replace(plain, top_p=0.5, top_k=100)
    alone, [beside, _] = sample(unified, cut)[0], sample(unified, cut, plain)
    assert tokens(alone) == tokens(beside) != tokens(free)
    assert all((one.logprobs_T == other.logprobs_T).all() for one, other in zip(alone, beside, strict=True))
    assert tokens(sample(unified, plain)[0]) == tokens(free)


def test_log_probs_of_greedy_requests_are_the_trainers_of_the_whole_distribution_in_any_company(unified):
    plain = SamplingParams(1.0, TOKENS)
    greedy, hot = replace(plain, temperature=0.0), replace(plain, temperature=2.0, top_k=1)
    [alone], [mixed, _], [hot_alone], [hot_mixed, _] = (sample(unified, *ways) for ways in ([greedy], [greedy, plain], [hot], [hot, plain]))
    samples = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(PROMPTS, alone, strict=True)]
    trainer = unified.call(trainer_engine.ask, "compute_logprobs", samples)[0]
    for answers in (alone, mixed):
        assert torch.equal(torch.from_numpy(np.concatenate([answer.logprobs_T for answer in answers])), trainer)
    assert trainer.max() < -0.1 and tokens(alone) == tokens(hot_alone) == tokens(hot_mixed)
    assert all((one.logprobs_T == other.logprobs_T).all() for one, other in zip(hot_alone, hot_mixed, strict=True))
    [kept] = sample(unified, replace(plain, top_k=1, record_kept_tokens=True))
    assert tokens(kept) == tokens(alone) and not any(answer.logprobs_T.any() for answer in kept), "a run trains on the kept token alone"


def test_an_aborted_request_ends_and_the_others_keep_their_bits(unified):
    plain = SamplingParams(1.0, TOKENS)
    [before] = sample(unified, plain)
    error, ended = unified.call(abort_generation, PROMPTS[:4], 400)[0]
    assert error == "AbortedError()" and any(reason == "abort" and 0 < count < 400 for reason, count in ended)
    [after] = sample(unified, plain)
    assert tokens(after) == tokens(before)
    assert all((one.logprobs_T == other.logprobs_T).all() for one, other in zip(before, after, strict=True))


def test_log_probs_are_those_of_the_distribution_sampled_from_on_both_sides(unified):
    bounds = {"top_k": 200, "top_p": 0.5, "min_p": 0.001, "record_kept_tokens": True}
    cut = unified.call(trainer_engine.generate, PROMPTS, TOKENS, bounds)[0]
    counts = np.concatenate([kept.counts for kept in cut["kept"]])
    assert len(counts) == len(cut["engine"]) >= 50 and counts.max() <= 200 and len(set(counts.tolist())) > 3
    assert torch.equal(cut["engine"], cut["trainer"])
    samples = [TrainingSample(prompt, answer) for prompt, answer in cut["samples"]]
    whole = unified.call(trainer_engine.ask, "compute_logprobs", samples)[0]
    mass = (whole - cut["engine"]).exp()  # that the kept tokens hold of the whole distribution
    assert mass.min() > 0.4999 and mass.median() < 0.6


def test_an_answer_ends_with_the_token_that_completes_a_stop_string_and_keeps_it(unified, checkpoint):
    tokenizer, plain = load_tokenizer(checkpoint), SamplingParams(1.0, TOKENS)
    [free] = sample(unified, plain)
    found = 0
    for seed, answer in enumerate(tokens(free)):
        texts = [tokenizer.decode(answer[place : place + 3]) for place in range(len(answer) - 2)]
        place = next((place for place, text in enumerate(texts) if text.isascii() and text.isprintable() and len(text) == 3), None)
        if place is None:
            continue
        found, ended = found + 1, replace(plain, seed=seed, stop=("never written", texts[place]))
        for params in (ended, replace(ended, max_new_tokens=place + 3)):  # ended by both at once, it is not truncated
            [stopped] = unified.call(trainer_engine.ask, "engines.generate", [PROMPTS[seed]], [params])[0]
            assert (stopped.output_ids_T.tolist(), stopped.finish_reason) == (answer[: place + 3], "stop")
        [cut] = unified.call(trainer_engine.ask, "engines.generate", [PROMPTS[seed]], [replace(ended, max_new_tokens=place + 2)])[0]
        assert (cut.output_ids_T.tolist(), cut.finish_reason) == (answer[: place + 2], "length")
    assert found, "the weights are random, and those that earlier tests left"


def test_the_engines_server_decodes_what_rank_0_would(unified, checkpoint):
    tokenizer, hot = load_tokenizer(checkpoint), SamplingParams(4.0, 8 * TOKENS)
    kept = replace(hot, stop=(f"{SPECIAL_TOKENS[1]}never written",))  # tokens in a stop text stay in the text
    for answers, params in zip(sample(unified, hot, kept), (hot, kept), strict=True):
        texts = [decode_completion(tokenizer, each, None, params.stop) for each in tokens(answers)]
        assert [answer.text for answer in answers] == texts and len("".join(texts)) > 100
