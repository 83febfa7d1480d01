"""Samples completions from a live engine in chunks. Each chunk is scored and written to disk before the next one."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import IO

from megatron_rl.evaluation.tallies import Outcome, Tally
from megatron_rl.redaction import redact_data
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.generation import Sampler
from megatron_rl.rollout.groups import assign_rewards, derive_seed
from megatron_rl.types import Completion, Problem, SamplingParams

_CHUNKS_IN_ENGINE = 2
"""One chunk that the engine is decoding, and one to fill slots as they become free."""
_VERSION = 0
"""Policy version of the engine's weights, which never change."""
_Job = tuple[int, int]
"""(index of the problem, number of the completion within the problem)."""


def append_completions(file: IO[str], side: str, scored: Sequence[tuple[Problem, int, Outcome]]) -> None:
    """Append one line per completion to `completions.jsonl` and flush them to disk.

    `scored` holds (problem, number of the completion within the problem, scored completion).
    """
    for problem, sample, outcome in scored:
        row = {
            "side": side,
            "problem": problem.id,
            "level": problem.level,
            "sample": sample,
            "prompt": problem.prompt,
            "text": outcome.text,
            "response": outcome.answer_text,
            "answer": outcome.answer(problem),
            "gold": problem.answer,
            "correct": outcome.reward.correct,
            "reward": outcome.reward.value,
            "tokens": outcome.tokens,
            "finish_reason": outcome.finish_reason,
            "error": outcome.reward.error,
        }
        file.write(json.dumps(redact_data(row)) + "\n")  # ASCII, because a completion may contain half a surrogate pair
    file.flush()
    os.fsync(file.fileno())


def sample(
    sampler: Sampler,
    rewards: Scorer,
    problems: Sequence[Problem],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    chunk: int,
    record: Callable[[Sequence[tuple[Problem, int, Outcome]]], None],
) -> list[Tally]:
    """Sample `samples` completions of every problem, `chunk` at a time, and return one tally per problem, in order.

    `record` is called with each chunk as soon as it is scored. Raises RunError if the engine or the reward workers fail.
    """
    jobs = [(index, number) for index in range(len(problems)) for number in range(samples)]
    chunks = (jobs[start : start + chunk] for start in range(0, len(jobs), chunk))
    outcomes: list[list[Outcome]] = [[] for _ in problems]

    def generate(jobs: list[_Job]) -> list[Completion]:
        seeds = [derive_seed(seed, _VERSION, "eval", index * samples + number) for index, number in jobs]
        params = [replace(sampling, seed=completion_seed) for completion_seed in seeds]
        return sampler.sample([problems[index] for index, _ in jobs], params, _VERSION)

    for chunk_jobs, completions in _generate_ahead(generate, chunks):
        assign_rewards(completions, rewards)
        scored = []
        for (index, number), completion in zip(chunk_jobs, completions, strict=True):
            outcome = Outcome.of(completion)
            outcomes[index].append(outcome)
            scored.append((problems[index], number, outcome))
        record(scored)
    return [Tally.of(problem, problem_outcomes) for problem, problem_outcomes in zip(problems, outcomes, strict=True)]


def _generate_ahead(
    generate: Callable[[list[_Job]], list[Completion]], chunks: Iterator[list[_Job]]
) -> Iterator[tuple[list[_Job], list[Completion]]]:
    """Yield (chunk, its completions) in order while the engine works on the next chunks."""
    threads = ThreadPoolExecutor(_CHUNKS_IN_ENGINE)
    pending: deque[tuple[list[_Job], Future[list[Completion]]]] = deque()
    try:
        while True:
            next_chunks = islice(chunks, _CHUNKS_IN_ENGINE - len(pending))
            pending.extend((jobs, threads.submit(generate, jobs)) for jobs in next_chunks)
            if not pending:
                return
            jobs, future = pending.popleft()
            yield jobs, future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # after an error, stopping the engine ends the running requests
