"""Checks of live engines: agents against the direct path, who may ask, and the record of routing. See `support.trainer_engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.mcore.passes.engine_emulation import emulate_engine
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.engine import Abort
from megatron_rl.types import Generation, Problem, SamplingParams
from support.agents import config
from support.engine_faults import engine_family
from support.trainer import Trainer
from support.trainer_engine import current, join_logprobs


class Recorder:
    """Engines that record requests and answers."""

    def __init__(self, engines: Any) -> None:
        self.engines, self.asked = engines, list[tuple[np.ndarray, SamplingParams, Generation]]()

    def generate(self, prompts: Sequence[np.ndarray], samplings: Sequence[SamplingParams], abort: Abort | None = None) -> list[Generation]:
        generations = self.engines.generate(prompts, samplings, abort)
        self.asked += zip(prompts, samplings, generations, strict=True)
        return generations


def same(one: Generation, other: Generation) -> bool:
    """Return whether two generations have the same bits: ids, log-probs, versions and experts."""
    names = ("output_ids_T", "logprobs_T", "versions_T", "routed_experts_T")
    arrays = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.policy_version == other.policy_version and all(
        (mine is None) == (its is None) and (mine is None or np.array_equal(mine, its)) for mine, its in arrays
    )


def sample_by_agents(count: int, tokens: int, version: int) -> dict[str, Any]:
    """Let `count` agents send three requests each, in conversations that branch after the first answer."""
    recorder, tokenizer = Recorder(current().engines), load_tokenizer(current().trainer.folder)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    problems = [Problem(str(number), "branch", "") for number in range(count)]
    samplings = [SamplingParams(1.0, tokens, seed=number) for number in range(count)]
    with AgentSampler(config(), recorder, tokenizer) as sampler:
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


def holds(conversation: Any, prompt: np.ndarray, _: SamplingParams, answer: Generation) -> bool:
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


def find_last(conversation: Any, prompts: Sequence[np.ndarray], answers: Sequence[Generation]) -> Generation:
    """Return the answer that a conversation ends with."""
    whole = [*conversation.prompt_ids_T, *conversation.output_ids_T]
    return next(answer for prompt, answer in zip(prompts, answers, strict=True) if [*prompt, *answer.output_ids_T] == whole)


ENDPOINTS = (
    "/generate", "/weights_checker", "/abort_request", "/flush_cache", "/begin_weight_update", "/end_weight_update",
    "/update_weight_version", "/update_weights_from_tensor", "/update_weights_from_disk", "/load_lora_adapter", "/server_info",
)  # fmt: skip


def ask_without_key() -> dict[str, list[int]]:
    """Return the statuses of endpoints, used by this project or not, without a key and with a wrong one."""
    url, wrong = current().engines.replicas[0].engine.server.url, {"Authorization": f"Bearer {'0' * 48}"}
    return {path: [httpx.post(url + path, json={}, headers=headers).status_code for headers in ({}, wrong)] for path in ENDPOINTS}


def read_server_arguments(names: list[str]) -> dict[str, Any]:
    """Return the first engine's server arguments of these names, as SGLang reports them."""

    def read(engines: Any) -> dict[str, Any]:
        engine = engines.replicas[0].engine
        answer = httpx.get(
            f"{engine.server.url}/server_info", headers={"Authorization": f"Bearer {engine.server.api_key}"}, timeout=60
        ).json()
        return {name: answer[name] for name in names}

    return current().rank0_engines.run(read)


def find_exposed() -> dict[str, Any]:
    """Return the addresses that the engines' processes listen on, the modes of their Unix sockets, and where a key can be read."""
    addresses, modes, readable = set(), set(), []
    for number, engine in enumerate(replica.engine for replica in current().engines.replicas):
        key = engine.server.api_key
        assert len(key) == 48
        for process in engine_family(current().engines, number):
            if any(key in word for word in process.cmdline()):
                readable.append(f"command line of {process.pid}")
            addresses |= {entry.laddr.ip for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN}
            sockets = [Path(entry.laddr) for entry in process.net_connections("unix") if entry.laddr]
            modes |= {path.stat().st_mode & 0o077 for path in sockets if path.exists()}
        readable += [str(file) for file in current().folder.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    return {"addresses": addresses, "modes": modes, "readable": readable}


ENVIRONMENT_IDS = [7, 8, 9]
"""What an environment says between two turns."""


def generate_two_turns(prompts: list[list[int]], tokens: int = 12) -> tuple[list[TrainingSample], bool, int]:
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
        samples.append(
            TrainingSample(prompt, ids, rollout_logprobs=logprobs, response_mask=sampled, routed_experts=torch.from_numpy(experts))
        )
    return samples, same, sum(turn.cached_tokens for turn in second)


def score(samples: list[TrainingSample]) -> dict[str, Any]:
    """Return the log-probs of all sampled tokens by the engine, by the trainer with replay (`replay`) and without (`free`), and by the
    trainer's model with the engine's products without replay (`emulated`); and for the last three the share of tokens whose experts
    differ from the engine's."""
    trainer = current().trainer
    routing, results = trainer.actor.routing, {"engine": torch.cat([sample.rollout_logprobs for sample in samples])}

    def compute(name: str) -> None:
        with routing.collect_stats(samples) as stats:
            results[name] = current().compute_logprobs(samples)
        results[f"{name} differs"] = stats.gather_metrics()["router/differs"]

    compute("replay")
    with routing.disable_replay():
        compute("free")
        with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.engine_format):
            compute("emulated")
    return results


def measure_dense_mismatch(checkpoint: Path, precision: dict[str, Any], samples: list[TrainingSample]) -> float:
    """Return the mean |difference| of log-probs between a dense model and the same model with its engine's products, which have the
    engine's bits."""
    trainer = Trainer(checkpoint, precision)
    plain = [replace(sample, routed_experts=torch.empty(0)) for sample in samples]
    own = torch.cat(trainer.actor.compute_logprobs(plain)[0])
    with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.engine_format):
        return float((torch.cat(trainer.actor.compute_logprobs(plain)[0]) - own).abs().mean())
