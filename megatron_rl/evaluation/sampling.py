"""Completions from a live engine: sampled in chunks, scored, and on the disk before the next chunk is looked at."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megatron_rl.evaluation.tallies import Outcome, Tally
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.worker import assign_rewards, derive_seed
from megatron_rl.types import Completion, Problem, SamplingParams

_AHEAD = 2
"""Chunks that the engine has at a time: one that it decodes, one for the places that become free."""

_VERSION = 0
"""The engine's first weights."""


class CompletionsFile:
    """`completions.jsonl`: one completion a line, {side, problem, level, sample, prompt, text, answer, gold, correct, reward, tokens,
    finish_reason, error}. Every chunk is on the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def append(self, side: str, scored: Sequence[tuple[Problem, int, Outcome]]) -> None:
        """`scored`: (problem, number of the completion among the problem's, completion)."""
        for problem, sample, outcome in scored:
            row = {
                "side": side,
                "problem": problem.id,
                "level": problem.level,
                "sample": sample,
                "prompt": problem.prompt,
                "text": outcome.text,
                "answer": outcome.answer(problem),
                "gold": problem.answer,
                "correct": outcome.reward.correct,
                "reward": outcome.reward.value,
                "tokens": outcome.tokens,
                "finish_reason": outcome.finish_reason,
                "error": outcome.reward.error,
            }
            self._file.write(json.dumps(row) + "\n")  # ASCII: a completion may hold half a surrogate pair
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def sample(
    sampler: MultiTurnSampler,
    rewards: Scorer,
    problems: Sequence[Problem],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    chunk: int,
    record: Callable[[Sequence[tuple[Problem, int, Outcome]]], None],
) -> list[Tally]:
    """`samples` completions of every problem: one tally per problem, in order. `record` is given each chunk as soon as it is scored.

    A problem's completions are asked for side by side, `chunk` completions at a time. Raises RunError where engine or reward workers fail.
    """
    jobs = [(place, number) for place in range(len(problems)) for number in range(samples)]
    chunks = [jobs[start : start + chunk] for start in range(0, len(jobs), chunk)]
    outcomes: list[list[Outcome]] = [[] for _ in problems]

    def generate(part: list[tuple[int, int]]) -> list[Completion]:
        seeds = [derive_seed(seed, _VERSION, "eval", place * samples + number) for place, number in part]
        return sampler.sample([problems[place] for place, _ in part], [replace(sampling, seed=one) for one in seeds], _VERSION)

    for part, completions in _ahead(generate, chunks):
        assign_rewards(completions, rewards)
        scored = []
        for (place, number), found in zip(part, completions, strict=True):
            outcome = Outcome(found.text, found.reward, found.sampled_count, found.finish_reason)
            outcomes[place].append(outcome)
            scored.append((problems[place], number, outcome))
        record(scored)
    return [Tally.of(problem, found) for problem, found in zip(problems, outcomes, strict=True)]


def _ahead(
    generate: Callable[[list[tuple[int, int]]], list[Completion]], chunks: Sequence[list[tuple[int, int]]]
) -> Iterator[tuple[list[tuple[int, int]], list[Completion]]]:
    """(chunk, its answers) in order, while the engine works on the next ones."""
    threads = ThreadPoolExecutor(_AHEAD)
    waiting: deque[tuple[list[tuple[int, int]], Future[list[Completion]]]] = deque()
    try:
        for part in chunks:
            waiting.append((part, threads.submit(generate, part)))
            if len(waiting) == _AHEAD:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # after an error the engine is ended, and with it what still runs
