"""The canary: compares log-probs of a few fixed prompts between every engine and the trainer, after each sync and before the engine serves.

Equal bytes do not prove that an engine computes with them: decoding may use a copy, and a cache may hold keys and values of the previous
weights. So after every sync each engine completes the same prompts with a few tokens. The first token comes from prefill, the others from
decoding, and each log-prob is compared with the trainer's for the same token. Because the prompts never change, a prefix cache that was not
emptied is detected as well.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.draws import mark_draws
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.draws import OtherDraw, find_other_draw
from megatron_rl.distributed import Rank0, is_rank0
from megatron_rl.errors import MismatchError, RunError
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.replicas import share_out
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.exactness import list_inexact
from megatron_rl.rollout.engine import Engine
from megatron_rl.types import Generation, SamplingParams
from parallel.formats import TensorFormat

TOKENS = 2  # tokens per completion: one from prefill, one from decoding
OTHER_KERNELS, OTHER_FORMATS = 1.0, 5.0
"""Bounds in nats for runs that do not promise exactness: the engine computes in the trainer's formats, or in other formats.
docs/reference/sync.md explains the values."""
LONGEST, LONGEST_ON_CPU = 160, 48
"""Tokens of the first prompt, unless the run's sequences are shorter. It exceeds a page of the KV cache: up to 128 tokens, 1 on a CPU."""


@dataclass(frozen=True)
class _Answer:
    engine: int
    prompt: int
    logprobs_T: np.ndarray
    sample: int  # index of the sample with the same tokens. Engines that sampled the same tokens share a sample.


class Canary:
    """Called by `megatron_rl.sync.weight_sync.WeightSync` on every rank."""

    def __init__(
        self, actor: Actor, prompts_B: list[np.ndarray], sampling: SamplingParams, bound: float, emulated: TensorFormat | None = None
    ) -> None:
        """Create the canary. `bound` is the largest allowed |log p trainer - log p engine| in nats, and `emulated` the engine's format if
        only the engine is quantized and the trainer emulates it (`mcore.engine_emulation`)."""
        self._actor, self._prompts_B, self._sampling, self._bound, self._emulated = actor, prompts_B, sampling, bound, emulated
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-canary")
        self._answers: Future[list[list[Generation]]] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that one engine is asked for."""
        return len(self._prompts_B) * self._sampling.max_new_tokens

    def ask(self, engines: Engine) -> None:
        """Send the prompts to every engine in a background thread. Rank 0."""
        self._answers = self._thread.submit(engines.answer_canary, self._prompts_B, self._sampling)

    def check(self, engines: Rank0[Engine], version: int, named_tensors: dict[str, torch.Tensor]) -> float:
        """Wait for the engines' answers and return the largest difference. `named_tensors` are this rank's weights as they were synced.
        Collective. Raise RunError if a difference exceeds the bound or an engine has another policy version."""
        read = Rank0(lambda: self._read(version))
        answers, samples = read.value if is_rank0() else ([], [])
        with nullcontext() if self._emulated is None else emulate_engine(self._actor.model, named_tensors, self._emulated):
            logprobs, other = self._score(samples)
        return engines.run(lambda _: self._compare(answers, logprobs, other), float)

    def _score(self, samples: list[TrainingSample]) -> tuple[dict[int, torch.Tensor], OtherDraw | None]:
        """Return the trainer's log-probs of rank 0's samples, by number, and the first token that its seed does not give. Each sample is
        scored by one replica. Collective."""
        own = share_out(samples)
        mark_draws(own, 0)
        with self._actor.record_draws() as draws:
            logprobs = self._actor.compute_logprobs(own)[0]
        few = {sample.number: values.tolist() for sample, values in zip(own, logprobs, strict=True)}
        of_all = {number: torch.tensor(values) for number, values in reduce.merge_replicas(few, list[float]).items()}
        return of_all, find_other_draw(draws, own, self._sampling)

    def _read(self, version: int) -> tuple[list[_Answer], list[TrainingSample]]:
        """Return the engines' answers and their distinct completions as samples. Rank 0."""
        assert self._answers is not None, "`ask` was not called"
        answers, samples = list[_Answer](), list[TrainingSample]()
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
        return answers, samples

    def _compare(self, answers: list[_Answer], logprobs: dict[int, torch.Tensor], other: OtherDraw | None) -> float:
        largest = 0.0
        for answer in answers:
            expected, prompt_tokens = logprobs[answer.sample].numpy(), len(self._prompts_B[answer.prompt])
            difference = np.abs(expected - answer.logprobs_T)
            for token in np.flatnonzero(~(difference <= self._bound))[:1]:
                phase = "decoding" if token else "prefill"
                raise MismatchError(
                    f"the canary fails: engine {answer.engine}, prompt {answer.prompt} of {prompt_tokens} tokens, position "
                    f"{prompt_tokens + token} ({phase}): log p is {answer.logprobs_T[token]:.9g} in the engine, {expected[token]:.9g} in "
                    f"the trainer; bound {self._bound:g} (sync.canary_bound)"
                )
            largest = max(largest, float(difference.max()))
        if other is not None and not self._bound:
            number, position, sampled, drawn = other
            answer = next(answer for answer in answers if answer.sample == number)
            raise RunError(
                f"the canary fails: engine {answer.engine}, prompt {answer.prompt}, position {position}: the engine sampled token "
                f"{sampled}, the trainer's distribution and the request's seed give {drawn}"
            )
        return largest


_EXACT_CPUS = ("AVX2", "AVX512")  # CPU capabilities, by PyTorch's names, for which `kernels.batch_invariant` was verified


def promises_exactness(config: Config, hf_config: dict[str, Any]) -> bool:
    """Return whether engine and trainer of this run give the same bits on this machine."""
    return torch.backends.cpu.get_cpu_capability() in _EXACT_CPUS and not list_inexact(config, hf_config, torch.cuda.is_available())


def make_canary(config: Config, actor: Actor, hf_config: dict[str, Any]) -> Canary | None:
    """Return the canary, or None if `sync.canary` is 0."""
    contract, emulated = PrecisionContract.from_config(config.precision), find_emulated(config, hf_config)
    bound = config.sync.canary_bound
    if bound is None:
        exact = emulated is not None or promises_exactness(config, hf_config)
        bound = 0.0 if exact else OTHER_KERNELS if contract.trainer_format == contract.engine_format else OTHER_FORMATS
    tokens = min(TOKENS, config.longest_sequence // 2)
    sampling = SamplingParams(config.rollout.temperature, tokens, config.train.seed)
    longest = min(config.longest_sequence - tokens, LONGEST if torch.cuda.is_available() else LONGEST_ON_CPU)
    prompts_B = make_prompts(config.sync.canary, hf_config["vocab_size"], longest, config.train.seed)
    return Canary(actor, prompts_B, sampling, bound, emulated) if prompts_B else None


def find_emulated(config: Config, hf_config: dict[str, Any]) -> TensorFormat | None:
    """Return the engine's format if only the engine is quantized and the trainer can emulate it bit for bit, or None. That requires one
    process on each side, and a run that would be exact without quantization."""
    contract = PrecisionContract.from_config(config.precision)
    if contract.trainer_format.quantized or not contract.engine_format.quantized or contract.engine_alone_quantizes_kv:
        return None
    plain = config.model_copy(update={"precision": config.precision.model_copy(update={"mode": "bf16"})})
    alone = config.train.layout.ranks == config.rollout.tp == 1
    return contract.engine_format if alone and promises_exactness(plain, hf_config) else None


def make_prompts(count: int, vocabulary: int, longest: int, seed: int) -> list[np.ndarray]:
    """Return `count` prompts of random token ids, int32, that depend on `seed` only: one of `longest` tokens, then short ones."""
    random, lengths = np.random.default_rng(seed), [longest, *(min(3 + 4 * number, longest) for number in range(1, count))]
    return [random.integers(0, vocabulary, length, np.int32) for length in lengths[:count]]


def _make_sample(prompt: np.ndarray, generation: Generation, number: int) -> TrainingSample:
    sample = TrainingSample(torch.from_numpy(prompt), torch.from_numpy(generation.output_ids_T), number=number)
    if generation.seed is not None:
        sample.seeds = torch.tensor([len(generation.output_ids_T), generation.seed])
    if generation.routed_experts_T is not None:
        sample.routed_experts = torch.from_numpy(generation.routed_experts_T)
    return sample
