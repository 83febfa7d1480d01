"""Sampling and scoring of groups: the completions of one problem. The group drawn first begins first and is scored when it has ended."""

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from megatron_rl.config import Config
from megatron_rl.errors import EngineLostError
from megatron_rl.metrics import declare
from megatron_rl.observability import hang_watchdog
from megatron_rl.rewards.foreign import Sample
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.engine import Abort, Engine, hash_seed
from megatron_rl.rollout.generation import Sampler
from megatron_rl.types import Completion, Problem, SamplingParams, Scored

GENERATE = declare("ahead/generate", "sampling this step's completions, in the background", "seconds")
REWARD = declare("ahead/reward", "scoring this step's completions, after the last one had been sampled", "seconds")
_FILL = 1.25  # completions in the engines per completion decoded at once; the surplus stands by
_SHORT = 1 << 13  # most tokens that the groups of a request may sample together; longer completions would keep their neighbors waiting
_REQUESTS = 8  # fewest requests of a step whose groups share them


@dataclass(frozen=True)
class GroupJob:
    """What the groups of one round have in common."""

    version: int
    purpose: str
    size: int
    sampling: SamplingParams
    wanted: int  # number of groups after which the remaining ones are aborted
    owed: int = 0  # number of leading groups that are never aborted
    staleness: int = 0
    per_request: int = 1  # number of groups that are sampled and scored together; 1 if groups may be aborted

    def choose(self, ended: Iterable[int]) -> list[int]:
        """Return the numbers of the groups to take in ascending order, or [] if too few have ended. `ended`: numbers in order of ending."""
        owed = [number for number in ended if number < self.owed]
        others = [number for number in ended if number >= self.owed][: self.wanted - self.owed]
        return sorted([*owed, *others]) if len(owed) + len(others) == self.wanted else []


@dataclass
class RolloutBatch:
    """Completions of one step, with the completions of each group adjacent, and the seconds of each phase."""

    completions_B: list[Completion]
    seconds: dict[str, float] = field(default_factory=dict)
    discarded_B: list[Completion] = field(default_factory=list)
    """Completions that dynamic sampling left out. They took time and count in the metrics."""
    sampling: dict[str, float] = field(default_factory=dict)  # metrics of dynamic sampling and over-sampling; empty if both are off


class GroupSampler:
    def __init__(self, config: Config, sampler: Sampler, rewards: Scorer, engines: Engine | None = None) -> None:
        """`engines`: those that may keep columns."""
        self._config, self._sampler, self._rewards, self._engines = config, sampler, rewards, engines
        self.per_request = _count_per_request(config)
        """Number of a step's groups that share a request, unless groups may be aborted."""
        self._threads = self.make_threads(config.rollout.group_size * self.per_request)

    def close(self) -> None:
        """Begin no further group."""
        self._sampler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def make_threads(self, group_size: int) -> ThreadPoolExecutor:
        """Return one thread per group that fits in the engines, so that further groups wait here, in order."""
        most = self._config.rollout.engines * self._config.rollout.max_running_requests
        return ThreadPoolExecutor(math.ceil(_FILL * most / group_size), thread_name_prefix="megatron-rl-group")

    def sample(
        self, problems_P: Sequence[Problem], job: GroupJob, ended: dict[int, list[Completion]], threads: ThreadPoolExecutor | None = None
    ) -> RolloutBatch:
        """Sample as many groups of the problems as `job` wants, and return them without metrics of sampling. `ended`: finished groups by
        number, to which groups that finish are added, even if others fail. `threads`: used instead of the shared ones."""
        start = time.perf_counter()
        missing = [] if job.choose(ended) else [number for number in range(len(problems_P)) if number not in ended]
        requests = [missing[first : first + job.per_request] for first in range(0, len(missing), job.per_request)]
        aborts = [Abort() if job.wanted < len(problems_P) else None for _ in requests]
        submit = (threads or self._threads).submit
        futures = {
            submit(self._sample_groups, [problems_P[number] for number in numbers], numbers, job, abort): numbers
            for numbers, abort in zip(requests, aborts, strict=True)
        }
        done = SimpleQueue[Future[tuple[list[Completion], float]]]()  # `as_completed` misses groups that `close` cancels
        for future in futures:
            future.add_done_callback(done.put)
        generated, failures, enough = start, list[Exception](), not futures
        for _ in futures:  # wait for all futures, so that none is still running on return
            future = done.get()
            if enough:
                continue
            try:
                completions, ended_at = future.result()
                for place, number in enumerate(futures[future]):
                    ended[number] = completions[place * job.size :][: job.size]
                generated = max(generated, ended_at)
            except Exception as error:  # includes the cancellation of a group
                failures.append(error)
            enough = not failures and len(ended) >= job.wanted and bool(job.choose(ended))
            for other, abort in zip(futures, aborts, strict=True) if enough else ():
                if not other.cancel() and abort:
                    abort.request()
        if failures:  # any other error takes precedence over a lost engine, which is recoverable
            raise min(failures, key=lambda error: isinstance(error, EngineLostError))
        completions_B = [member for number in job.choose(ended) for member in ended[number]]
        return RolloutBatch(completions_B, {GENERATE: generated - start, REWARD: time.perf_counter() - generated})

    def _sample_groups(
        self, problems: Sequence[Problem], numbers: Sequence[int], job: GroupJob, abort: Abort | None
    ) -> tuple[list[Completion], float]:
        """Return the scored completions of groups, one group after the other, and the time at which they had been generated."""
        members = [number * job.size + member for number in numbers for member in range(job.size)]
        samplings = [replace(job.sampling, seed=derive_seed(self._config.train.seed, job.version, job.purpose, index)) for index in members]
        problems_B = [problem for problem in problems for _ in range(job.size)]
        while True:
            completions = self._sampler.sample(problems_B, samplings, job.version, job.staleness, abort)
            generated = time.perf_counter()
            hang_watchdog.enter_phase("reward")
            remote_B = [completion.remote for completion in completions if completion.remote and completion.remote.has_text]
            if self._engines is None or not remote_B:
                assign_rewards(completions, self._rewards)
                return completions, generated
            try:
                scored_B = self._engines.score(remote_B, problems_B)
            except EngineLostError:  # with the completions; another engine samples them, or all are lost
                continue
            assign_scored(completions, scored_B, self._rewards)
            return completions, generated


def _count_per_request(config: Config) -> int:
    """Return the number of a step's groups in a request: a request costs about 3 CPU ms besides its completions. Groups with turns,
    several engines, or sampling ahead have requests of their own, so that no group waits for another one."""
    rollout = config.rollout
    if config.environment is not None or config.agent is not None or rollout.engines > 1 or config.placement.max_staleness:
        return 1
    completions = min(_SHORT // rollout.max_new_tokens, rollout.max_running_requests)
    return max(min(completions // rollout.group_size, rollout.prompts_per_step // _REQUESTS), 1)


def derive_seed(run: int, version: int, purpose: str, index: int) -> int:
    """Return the sampling seed of one completion. A resumed run samples what the uninterrupted run would have sampled."""
    return hash_seed(run, version, purpose, index)


def assign_rewards(completions_B: Sequence[Completion], rewards: Scorer) -> None:
    """Set the reward of each completion. A completion whose environment or agent failed has no verdict."""
    own_B = [completion.own_reward for completion in completions_B]
    rewards_B = rewards.score(
        [completion.text for completion in completions_B],
        [completion.problem for completion in completions_B],
        [completion.total_sampled for completion in completions_B],
        [completion.environment_error and f"{completion.finish_reason}: {completion.environment_error}" for completion in completions_B],
        own_B if any(own is not None for own in own_B) else None,
        [Sample(completion.output_ids_T.tobytes(), completion.dialogue) for completion in completions_B],
    )
    for completion, reward in zip(completions_B, rewards_B, strict=True):
        completion.reward = reward
        completion.answer_text, completion.thought = response = rewards.split(completion.text, completion.problem)
        completion.thought_share = response.compute_thought_share(completion.text)


def assign_scored(completions_B: Sequence[Completion], scored_B: Sequence[Scored], rewards: Scorer) -> None:
    """Set the reward of completions whose texts an engine keeps."""
    rewards_B = rewards.settle([scored.reward for scored in scored_B], [completion.problem for completion in completions_B])
    for completion, scored, reward in zip(completions_B, scored_B, rewards_B, strict=True):
        completion.reward, completion.thought_share = reward, scored.thought_share
        completion.answer_text = None if scored.unfinished else ""
