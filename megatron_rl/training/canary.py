"""The canary: a few fixed prompts through every engine after a sync, before it answers, and through the trainer's own forward pass.

Equal bytes do not say that an engine computes with them: decoding may run on a copy, and a cache may hold keys and values of the weights
before. So each engine reads the same prompts after every sync and goes on for a few tokens. The first token's log-prob comes of prefill,
the others of decoding; every one is compared with the trainer's for the same tokens. As the prompts stay the same, a prefix cache that was
not emptied gives itself away.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.packing import compute_costs, deal
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.engine_emulation import emulate_engine
from megatron_rl.mcore.passes.replicas import count_replicas, scatter_samples
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.exactness import list_inexact
from megatron_rl.rollout.engine import Engine
from megatron_rl.types import Generation, SamplingParams
from parallel.formats import TensorFormat

TOKENS = 2
"""Tokens that follow a prompt: one of prefill, one of decoding."""
OTHER_KERNELS, OTHER_FORMATS = 1.0, 5.0
"""Bounds in nats of runs that promise no exactness, whose engine computes in the trainer's formats or in others. Where they come from:
docs/reference/sync.md."""
LONGEST, LONGEST_ON_CPU = 160, 48
"""Tokens of the first prompt, if the run's sequences may be so long: more than a page of the KV cache, 128 at most and 1 on a CPU."""


@dataclass(frozen=True)
class _Answer:
    """Of rank 0."""

    engine: int
    prompt: int
    logprobs_T: np.ndarray
    sample: int
    """Number of the sample that has its tokens; engines that drew the same share one."""


class Canary:
    """Called by `megatron_rl.sync.weight_sync.WeightSync` on every rank."""

    def __init__(
        self, actor: Actor, prompts_B: list[np.ndarray], sampling: SamplingParams, bound: float, emulated: TensorFormat | None = None
    ) -> None:
        """`bound`: of |log p trainer - log p engine|, in nats. `emulated`: the engine's format, where the trainer is to multiply as an
        engine that alone is quantized (`mcore.passes.engine_emulation`)."""
        self._actor, self._prompts_B, self._sampling, self._bound, self._emulated = actor, prompts_B, sampling, bound, emulated
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-canary")
        self._answers: Future[list[list[Generation]]] | None = None

    def ask(self, engines: Engine) -> None:
        """Begin to ask every engine, in a thread. Rank 0."""
        self._answers = self._thread.submit(engines.answer_canary, self._prompts_B, self._sampling)

    def check(self, engines: Rank0[Engine], version: int, named_tensors: dict[str, torch.Tensor]) -> float:
        """Return the largest difference in what was asked. `named_tensors`: this rank's, as given to the engines. Collective.

        Raise RunError, which names engine, prompt and position, for the first difference above the bound, or for an engine of another
        policy version.
        """
        answers, samples = list[_Answer](), list[TrainingSample]()
        engines.run(lambda _: self._read(version, answers, samples))
        with nullcontext() if self._emulated is None else emulate_engine(self._actor.model, named_tensors, self._emulated):
            logprobs = _score(self._actor, samples)
        return engines.run(lambda _: self._compare(answers, logprobs))

    def _read(self, version: int, answers: list[_Answer], samples: list[TrainingSample]) -> None:
        """Fill in the engines' answers, and each different one as a sample. Rank 0."""
        assert self._answers is not None, "nothing was asked"
        numbers: dict[tuple[int, bytes], int] = {}
        for engine, generations in enumerate(self._answers.result()):
            for prompt, generation in enumerate(generations):
                if generation.policy_version != version or len(generation.logprobs_T) != self._sampling.max_new_tokens:
                    what = f"{len(generation.logprobs_T)} tokens of policy version {generation.policy_version}"
                    raise RunError(f"the canary of policy version {version} fails: engine {engine} answers with {what}")
                number = numbers.setdefault((prompt, generation.output_ids_T.tobytes()), len(samples))
                if number == len(samples):
                    samples.append(_make_sample(self._prompts_B[prompt], generation, number))
                answers.append(_Answer(engine, prompt, generation.logprobs_T, number))

    def _compare(self, answers: list[_Answer], logprobs: dict[int, torch.Tensor]) -> float:
        largest = 0.0
        for answer in answers:
            expected, prompt_tokens = logprobs[answer.sample].numpy(), len(self._prompts_B[answer.prompt])
            difference = np.abs(expected - answer.logprobs_T)
            for token in np.flatnonzero(~(difference <= self._bound))[:1]:
                phase = "decoding" if token else "prefill"
                raise RunError(
                    f"the canary fails: engine {answer.engine}, prompt {answer.prompt} of {prompt_tokens} tokens, position "
                    f"{prompt_tokens + token} ({phase}): log p is {answer.logprobs_T[token]:.9g} in the engine, {expected[token]:.9g} in "
                    f"the trainer; bound {self._bound:g} (sync.canary_bound)"
                )
            largest = max(largest, float(difference.max()))
        return largest


_MEASURED = ("AVX2", "AVX512")
"""CPUs on which `kernels.batch_invariant` was measured, as torch calls them."""


def promises_exactness(config: Config, hf_config: dict[str, Any]) -> bool:
    """Return whether engine and trainer of this run agree to the bit on this machine."""
    return torch.backends.cpu.get_cpu_capability() in _MEASURED and not list_inexact(config, hf_config, torch.cuda.is_available())


def make_canary(config: Config, actor: Actor, hf_config: dict[str, Any]) -> Canary | None:
    """Return the canary that `config.sync` asks for; None for none."""
    contract, emulated = PrecisionContract.from_config(config.precision), _find_emulated(config, hf_config)
    bound = config.sync.canary_bound
    if bound is None:
        exact = emulated is not None or promises_exactness(config, hf_config)
        bound = 0.0 if exact else OTHER_KERNELS if contract.trainer_format == contract.engine_format else OTHER_FORMATS
    tokens = min(TOKENS, config.longest_sequence // 2)
    sampling = SamplingParams(config.rollout.temperature, tokens, config.train.seed)
    longest = min(config.longest_sequence - tokens, LONGEST if torch.cuda.is_available() else LONGEST_ON_CPU)
    prompts_B = make_prompts(config.sync.canary, hf_config["vocab_size"], longest, config.train.seed)
    return Canary(actor, prompts_B, sampling, bound, emulated) if prompts_B else None


def _find_emulated(config: Config, hf_config: dict[str, Any]) -> TensorFormat | None:
    """Return the format of an engine that alone is quantized, if the trainer can multiply as it does, to the bit: with one process each,
    where all else agrees to the bit."""
    contract = PrecisionContract.from_config(config.precision)
    if contract.trainer_format.quantized or not contract.engine_format.quantized or contract.engine_alone_quantizes_kv:
        return None
    plain = config.model_copy(update={"precision": config.precision.model_copy(update={"mode": "bf16"})})
    alone = config.train.layout.ranks == config.rollout.tp == 1
    return contract.engine_format if alone and promises_exactness(plain, hf_config) else None


def make_prompts(count: int, vocabulary: int, longest: int, seed: int) -> list[np.ndarray]:
    """Return random token ids, int32, always the same: one prompt of `longest` tokens, and short ones."""
    random, lengths = np.random.default_rng(seed), [longest, *(min(3 + 4 * number, longest) for number in range(1, count))]
    return [random.integers(0, vocabulary, length, np.int32) for length in lengths[:count]]


def _make_sample(prompt: np.ndarray, generation: Generation, number: int) -> TrainingSample:
    sample = TrainingSample(torch.from_numpy(prompt), torch.from_numpy(generation.output_ids_T), number=number)
    if generation.routed_experts_T is not None:
        sample.routed_experts = torch.from_numpy(generation.routed_experts_T)
    return sample


def _score(actor: Actor, samples: list[TrainingSample]) -> dict[int, torch.Tensor]:
    """Return the trainer's log-probs of rank 0's samples, by number. Each is computed on one replica. Collective."""
    shares = deal(compute_costs([sample.length for sample in samples]), count_replicas()) if samples else []
    own = scatter_samples([[samples[index] for index in share] for share in shares])
    logprobs = actor.compute_logprobs(own)[0]
    return reduce.merge_replicas({sample.number: values for sample, values in zip(own, logprobs, strict=True)})
