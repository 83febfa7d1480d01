"""Checks of the live engines of `support.trainer_engine`: agents against the direct path, and weight switches under load."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import torch
from support import lossy_agents
from support.agents import config
from support.processes import until
from support.trainer_engine import MIB, current, join_logprobs, make_samples, train

from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.data import DataConfig
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import Problem, SamplingParams


def release_memory_and_take_it_back(version, prompts):
    """Return the engine's MiB after a sync, after a release of its memory, and after the next sync; whether a request waited; and the
    proved tensors."""
    served, answered = current(), threading.Event()

    def ask():
        served.engines.generate(prompts, SamplingParams(1.0, 4))
        answered.set()

    with served.weight_sync() as sync:
        sync.run(version)
        served.engines.release_memory()
        sync.run(version + 1)
        awake = served.engines.get_memory_mb()
        served.engines.release_memory()
        served.engines.release_memory()
        released = served.engines.get_memory_mb()
        asking = threading.Thread(target=ask)
        asking.start()
        waited = not answered.wait(1.0)
        report = sync.run(version + 2)
        asking.join()
        return {"awake": awake, "released": released, "again": served.engines.get_memory_mb(), "waited": waited, "proved": report.proved}


_THREADS = 4


def switch_under_load(settings, first, switches, batch, prompts, tokens):
    """Keep four threads sampling while the policy is trained and synced as versions first, first + 1, ...

    Returns the reports of the syncs, the number of running requests when each sync began, the number of completions with tokens of several
    versions (`mixed`), and for each version the log-probs of its tokens by the engine and by the trainer of that version.
    """
    served, stop, answers = current(), threading.Event(), []
    weights, reports, running = {}, [], []

    def ask(thread):
        mine = prompts[thread::_THREADS]
        while not stop.is_set():
            answers.extend(zip(mine, served.engines.generate(mine, SamplingParams(temperature=1.0, max_new_tokens=tokens)), strict=True))

    def wait_for_answers(asking):
        goal = len(answers) + len(prompts)
        until(lambda: len(answers) >= goal or any(task.done() for task in asking), 300, "answers")

    with served.weight_sync(MIB, settings) as sync, ThreadPoolExecutor(_THREADS) as pool:
        sync.run(first)
        asking = [pool.submit(ask, thread) for thread in range(_THREADS)]
        try:
            for version in range(first, first + switches + 1):
                if version > first:
                    running.append(sum(replica.outstanding for replica in served.engines.replicas))
                    reports.append(asdict(sync.run(version)))
                weights[version] = copy_weights(served.trainer.model)
                wait_for_answers(asking)
                train(batch)
        finally:
            stop.set()
        for task in asking:
            task.result()
    mixed = sum(generation.versions_T is not None for _, generation in answers)
    return {"reports": reports, "running": running, "mixed": mixed, "logprobs": compare_logprobs(weights, answers)}


def copy_weights(model):
    """Return copies of the parameters, and of the scales of quantized ones."""
    scales = {name: layer.scale.clone() for name, layer in find_quantized_layers(model).items()}
    return {name: value.detach().clone() for name, value in model.named_parameters()}, scales


def compare_logprobs(weights, answers):
    """Return for each version the log-probs of its tokens by the engine, and by the trainer with that version's weights."""
    logprobs, model = {}, current().trainer.model
    versions = [
        [generation.policy_version] * len(generation.output_ids_T) if generation.versions_T is None else generation.versions_T.tolist()
        for _, generation in answers
    ]
    for version in sorted(set().union(*versions)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[version][0][name])
        for name, layer in find_quantized_layers(model).items():
            layer.set_scale(weights[version][1][name])
        sampled = [(*answer, each) for answer, each in zip(answers, versions, strict=True) if version in each]
        prompts, generations, token_versions = zip(*sampled, strict=True)
        own = torch.tensor([number for each in token_versions for number in each]) == version
        engine = join_logprobs(generations)
        logprobs[version] = engine[own], current().compute_logprobs(make_samples(prompts, generations))[own]
    return logprobs


class Recorder:
    """Engines that record requests and answers."""

    def __init__(self, engines):
        self.engines, self.asked = engines, []

    def generate(self, prompts, samplings, abort=None):
        generations = self.engines.generate(prompts, samplings, abort)
        self.asked += zip(prompts, samplings, generations, strict=True)
        return generations


def same(one, other):
    """Return whether two generations have the same bits: ids, log-probs, versions and experts."""
    names = ("output_ids_T", "logprobs_T", "versions_T", "routed_experts_T")
    arrays = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.policy_version == other.policy_version and all(
        (mine is None) == (its is None) and (mine is None or np.array_equal(mine, its)) for mine, its in arrays
    )


def sample_by_agents(count, tokens, version):
    """Let `count` agents send three requests each, in conversations that branch after the first answer."""
    recorder, tokenizer = Recorder(current().engines), load_tokenizer(current().trainer.folder)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    problems = [Problem(str(number), "branch", "") for number in range(count)]
    samplings = [SamplingParams(1.0, tokens, seed=number) for number in range(count)]
    with AgentSampler(config(), recorder, tokenizer, DataConfig()) as sampler:
        completions = sampler.sample(problems, samplings, version)
    prompts, asked, answers = zip(*recorder.asked, strict=True)
    direct = current().engines.generate(prompts, asked)
    conversations = [each for completion in completions for each in completion.conversations]
    samples = [TrainingSample(each.prompt_ids_T, each.output_ids_T, response_mask=each.response_mask_T) for each in conversations]
    return {
        "errors": [completion.environment_error for completion in completions],
        "conversations": len(conversations),
        "sampled": sum(each.sampled_count for each in conversations) - sum(len(answer.output_ids_T) for answer in answers),
        "same": [same(*pair) for pair in zip(answers, direct, strict=True)],
        "held": [any(holds(each, *request) for each in conversations) for request in recorder.asked],
        "routed": [each.routed_experts_T for each in conversations],
        "direct routed": [find_last(each, prompts, direct).routed_experts_T for each in conversations],
        "versions": {each.policy_version for each in conversations},
        "engine": torch.cat([torch.tensor(each.logprobs_T[each.response_mask_T]) for each in conversations]),
        "trainer": current().compute_logprobs(samples),
    }


def sample_behind_a_proxy(count, tokens, folder):
    """Let `count` agents of `support.lossy_agents` ask. Return their completions' responses, and what they have received, with faults."""
    os.environ[lossy_agents.FOLDER_VARIABLE] = str(folder)
    tokenizer = load_tokenizer(current().trainer.folder)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    problems = [Problem(str(number), "", "") for number in range(count)]
    samplings = [SamplingParams(1.0, tokens, seed=number) for number in range(count)]
    settings = config(name="support.lossy_agents:solve", max_calls=6, timeout=600)
    with AgentSampler(settings, lossy_agents.HoldingEngine(current().engines, folder), tokenizer, DataConfig()) as sampler:
        completions = sampler.sample(problems, samplings, 0)
    conversations = [each for completion in completions for each in completion.conversations]
    samples = [TrainingSample(each.prompt_ids_T, each.output_ids_T, response_mask=each.response_mask_T) for each in conversations]
    return {
        "errors": [completion.environment_error for completion in completions],
        "trained": [lossy_agents.list_trained(completion, tokenizer) for completion in completions],
        "dropped": sum(completion.dropped_calls for completion in completions),
        "notes": [note for completion in completions for note in completion.history_notes],
        "received": [json.loads((folder / problem.id).read_text()) for problem in problems],
        "engine": torch.cat([torch.tensor(each.logprobs_T[each.response_mask_T]) for each in conversations]),
        "trainer": current().compute_logprobs(samples),
    }


def holds(conversation, prompt, _, answer):
    """Return whether a conversation trains on an answer, after exactly the tokens of its prompt, with its log-probs."""
    start = len(prompt) - len(conversation.prompt_ids_T)
    place = slice(start, start + len(answer.output_ids_T))
    return (
        np.array_equal(
            np.concatenate([conversation.prompt_ids_T, conversation.output_ids_T[: place.stop]]), [*prompt, *answer.output_ids_T]
        )
        and conversation.response_mask_T[place].all()
        and np.array_equal(conversation.logprobs_T[place], answer.logprobs_T)
    )


def find_last(conversation, prompts, answers):
    """Return the answer that a conversation ends with."""
    whole = [*conversation.prompt_ids_T, *conversation.output_ids_T]
    return next(answer for prompt, answer in zip(prompts, answers, strict=True) if [*prompt, *answer.output_ids_T] == whole)
