"""Rollout worker on rank 0: draws problems, assembles batches of scored groups, and evaluates held-out problems."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.algorithm.length_penalty import compute_overlong_penalty
from megatron_rl.config import Config
from megatron_rl.data import ProblemStream
from megatron_rl.errors import EngineLostError
from megatron_rl.metrics import STEP_SECONDS, declare
from megatron_rl.rewards.scorer import Scorer, check_verdicts
from megatron_rl.rollout.constant_rewards import ConstantRewards
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.generation import Sampler
from megatron_rl.rollout.groups import GroupJob, GroupSampler, RolloutBatch
from megatron_rl.rollout.metrics import select_evenly
from megatron_rl.types import ColumnPlace, Completion, Problem, are_equal, group_by_engine

_SAMPLING = (
    declare("sampling/rounds", "rounds of sampling to fill the batch", "count"),
    declare("sampling/discarded", "groups left out because their rewards are equal or their accuracy is out of range", "count"),
    declare("sampling/without_signal", "groups in the batch whose rewards are equal", "count"),
)
_ABORTED = declare("sampling/aborted", "groups aborted because enough others had ended", "count")
_LEFT_OUT = declare("data/left_out_{}", "problems of the set {} that its epoch leaves out", "count")
WAIT = declare("time/generate", "waiting for the completions and their rewards", "seconds", STEP_SECONDS)


@dataclass(eq=False)
class StepDraw:
    """The problems of one step, and the groups that have ended."""

    version: int  # policy version at which the trainer trains on them
    rounds: list[dict[int, Problem]]  # problems by position in the problem stream, for each round of dynamic sampling
    owed: int  # number of leading problems of the first round that were drawn for an earlier step; they are never aborted
    ended: dict[int, dict[int, list[Completion]]] = field(default_factory=dict)
    """Round -> group number -> scored completions, in order of ending."""


class RolloutWorker:
    """Samples and scores completions on rank 0."""

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        stream: ProblemStream,
        held_out: list[Problem],
        rewards: Scorer,
        notify: Callable[[str], None] = print,
        columns: ColumnPlace = "here",
        engines: Engine | None = None,
    ) -> None:
        """`notify` receives warnings. `columns`: where those of completions go; `engines`: those that may keep them."""
        self._config, self._stream, self._held_out = config, stream, held_out
        self._constant_rewards = ConstantRewards(config, notify)
        self._drawing = threading.Lock()
        self._groups, self._columns, self._engines = GroupSampler(config, sampler, rewards, engines), columns, engines

    def snapshot(self, untrained: Iterable[StepDraw] = ()) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the state of the problem stream as if `untrained` had not been drawn. Sampling has no state."""
        with self._drawing:
            return self._stream.snapshot(position for draw in untrained for problems in draw.rounds for position in problems)

    def draw(self, version: int) -> StepDraw:
        """Draw the problems that the trainer trains on at `version`. Call it in the order of the steps."""
        prompts, extra = self._config.rollout.prompts_per_step, self._config.rollout.over_sampling_prompts
        with self._drawing:
            owed = min(self._stream.left_out_count, prompts)
            problems = self._stream.draw(prompts + (extra if owed < prompts else 0), owed)
        return StepDraw(version, [problems], owed)

    def collect(self, draw: StepDraw) -> RolloutBatch:
        """Sample and score the groups of a step. Several threads may call it for different steps; groups are queued in order of the calls.
        With dynamic sampling (DAPO, arXiv 2503.14476), a group whose completions all earn the same reward, or whose accuracy is out of
        range (PRIME, arXiv 2502.01456), is replaced by a group of the next problem. After the last round, such groups fill the batch. Raise
        RunError if a token was sampled by an unexpected version. After an EngineLostError, `draw` keeps the groups that have ended, and
        another call samples the others. Raise RunError if too many completions have no verdict (`reward.max_error_share`)."""
        rollout = self._collect(draw)
        check_verdicts([completion.reward for completion in (*rollout.completions_B, *rollout.discarded_B)], self._config.reward)
        return rollout

    def _collect(self, draw: StepDraw) -> RolloutBatch:
        prompts, max_rounds = self._config.rollout.prompts_per_step, self._config.algorithm.dynamic_sampling_max_rounds
        if not max_rounds:
            return self._sample_round(draw, 0)
        algorithm, informative, others = self._config.algorithm, list[list[Completion]](), list[list[Completion]]()
        seconds, rounds = dict[str, float](), 0
        while len(informative) < prompts and rounds < max_rounds:
            if rounds == len(draw.rounds):
                with self._drawing:
                    draw.rounds.append(self._stream.draw(prompts - len(informative)))
            rollout = self._sample_round(draw, rounds)
            for group in self._split_groups(rollout.completions_B):
                in_range = algorithm.accuracy_low <= _compute_group_accuracy(group) <= algorithm.accuracy_high
                for member in group:
                    member.masked |= not in_range
                (informative if in_range and _has_reward_spread(group) else others).append(group)
            seconds = {name: seconds.get(name, 0.0) + spent for name, spent in rollout.seconds.items()}
            rounds += 1
        missing = prompts - len(informative)
        return RolloutBatch(
            [member for group in [*informative, *others[:missing]] for member in group],
            seconds,
            [member for group in others[missing:] for member in group],
            dict(zip(_SAMPLING, map(float, (rounds, len(others) - missing, missing)), strict=True)),
        )

    def _sample_round(self, draw: StepDraw, number: int) -> RolloutBatch:
        """Sample one round of groups and set their length penalties. Problems of aborted groups are given back to the stream."""
        problems_P, ended = [*draw.rounds[number].values()], draw.ended.setdefault(number, {})
        wanted = min(len(problems_P), self._config.rollout.prompts_per_step)
        sampling, staleness = replace(self._config.rollout.to_sampling(), columns=self._columns), self._config.placement.max_staleness
        job = GroupJob(draw.version, f"train/{number}", self._config.rollout.group_size, sampling, wanted, draw.owed, staleness)
        if wanted == len(problems_P):
            job = replace(job, per_request=self._groups.per_request)
        rollout = self._groups.sample(problems_P, job, ended)
        if wanted < len(problems_P):
            rollout.sampling = {_ABORTED: float(self._give_back(draw, {*job.choose(ended)}))}
        algorithm, max_tokens = self._config.algorithm, self._config.rollout.max_new_tokens
        for completion in rollout.completions_B:
            completion.masked = algorithm.mask_truncated_completions and completion.finish_reason == "length"
            completion.length_penalty = compute_overlong_penalty(
                completion.longest_sampled, max_tokens, algorithm.overlong_share, algorithm.overlong_penalty
            )
        return rollout

    def _give_back(self, draw: StepDraw, taken: set[int]) -> int:
        """Return the problems of groups that are not in `taken` to the stream, for a later step. Return their number."""
        kept, aborted = dict[int, Problem](), dict[int, Problem]()
        for number, (position, problem) in enumerate(draw.rounds[0].items()):
            (kept if number in taken else aborted)[position] = problem
        with self._drawing:
            self._stream.give_back(aborted)
            draw.rounds[0] = kept
        return len(aborted)

    def _find_lost(self, completions: Sequence[Completion]) -> set[str]:
        """Return the handles of columns that no engine keeps any more."""
        remotes = [completion.remote for completion in completions if completion.remote is not None]
        if self._engines is None or not remotes:
            return set()
        return {remote.handle for remote in remotes} - self._engines.find_columns(group_by_engine(remotes))

    def read_shown(self, rollout: RolloutBatch) -> None:
        """Read the texts of the completions that the report shows from the engines that keep them. Raise EngineLostError if one is lost."""
        shown = select_evenly(rollout.completions_B, self._config.log.samples)
        kept = [(completion, completion.remote) for completion in shown if completion.remote and completion.remote.has_text]
        if self._engines is not None and kept:
            texts = self._engines.read_texts([remote for _, remote in kept])
            for (completion, _), (text, response) in zip(kept, texts, strict=True):
                completion.text, (completion.answer_text, completion.thought) = text, response

    def forget_lost(self, draw: StepDraw, rollout: RolloutBatch) -> bool:
        """Forget the ended groups of a step that have lost columns, so that `collect` samples them again. Return whether there are any."""
        lost = self._find_lost(rollout.completions_B)
        for ended in draw.ended.values():
            for number in [number for number, group in ended.items() if any(each.remote and each.remote.handle in lost for each in group)]:
                del ended[number]
        return bool(lost)

    def observe(self, rollout: RolloutBatch, version: int) -> dict[str, float]:
        """Report the pass rates of a step's groups to the problem stream. Return metrics of the problems that the stream leaves out. Warn
        about rewards without a signal in the first steps."""
        self._constant_rewards.observe(version, (*rollout.completions_B, *rollout.discarded_B))
        rates = dict[str, float]()
        for members in (rollout.completions_B, rollout.discarded_B) if self._stream.measures else ():
            for group in self._split_groups(members):
                if not all(member.reward.excluded for member in group):
                    rates[group[0].problem.id] = _compute_group_accuracy(group)
        with self._drawing:
            self._stream.observe(rates)
            return {_LEFT_OUT.format(label): float(count) for label, count in self._stream.left_out_by_set.items()}

    def evaluate(self, version: int) -> RolloutBatch:
        """Return `eval.samples` scored completions of every held-out problem, with the completions of a problem adjacent."""
        sampling = replace(self._config.to_eval_sampling(), columns=self._columns)
        size, turns = self._config.eval.samples, self._config.environment is not None or self._config.agent is not None
        per_request = 1 if turns else max(1, self._config.rollout.group_size // size)  # a request costs what one of the rollout costs
        job = GroupJob(version, "eval", size, sampling, len(self._held_out), per_request=per_request)
        with self._groups.make_threads(size * per_request) as threads:  # separate threads, so that groups sampled ahead do not delay it
            rollout = self._groups.sample(self._held_out, job, {}, threads)
        check_verdicts([completion.reward for completion in rollout.completions_B], self._config.reward)
        return rollout

    def close(self) -> None:
        """Begin no further group."""
        self._groups.close()

    def _split_groups(self, completions: list[Completion]) -> list[list[Completion]]:
        size = self._config.rollout.group_size
        return [completions[start : start + size] for start in range(0, len(completions), size)]


def _has_reward_spread(group: Sequence[Completion]) -> bool:
    """Return whether the rewards differ. Length penalties do not count, since they would keep groups that are all wrong."""
    return not are_equal(member.reward.value for member in group if not member.reward.excluded)


def _compute_group_accuracy(group: Sequence[Completion]) -> float:
    """Return the share of correct completions among those with a verdict, or 0 if there are none."""
    verdicts = [member.reward.correct for member in group if not member.reward.excluded]
    return sum(verdicts) / max(len(verdicts), 1)


@dataclass
class _Step:
    draw: StepDraw
    rollout: Future[RolloutBatch]
    observed: dict[str, float] | None = None  # what `RolloutWorker.observe` returned, once the trainer has collected it


class AsyncRolloutWorker:
    """A `RolloutWorker` that generates groups of later steps in background threads, a bounded number of versions ahead of the trainer.

        trainer, max_staleness = 1 | train on 0 |   wait   | sync 1 | train on 1 | sync 2 | ...
        groups in the engines      | ...........step 1..........->  | .....step 2.....    | ...
                                                  step 2 begins ^ when the engines hold version 1; both run until step 1's last group ends

    The groups of step v begin when the engines hold version v - max_staleness, so no token is older than that. With 0, only the proof of
    the weights, an evaluation and a checkpoint run at the same time. Groups do not wait for those of earlier steps.

    The trainer takes groups in the order in which they were drawn. The groups of a step therefore do not depend on their lengths, and every
    problem is trained on once. If the engines are lost, finished groups are kept and the other groups are sampled again. All calls must
    come from a single thread.
    """

    def __init__(self, worker: RolloutWorker, max_staleness: int, steps: int, stop_engine: Callable[[], None]) -> None:
        """`steps`: the last version of the run, for which nothing is generated. `stop_engine` makes running requests fail, see `close`."""
        self._worker, self._max_staleness, self._steps, self._stop_engine = worker, max_staleness, steps, stop_engine
        self._threads = ThreadPoolExecutor(max_staleness + 1, thread_name_prefix="megatron-rl-rollout")  # one per step
        self._pending: deque[_Step] = deque()
        self._collected: _Step | None = None  # the newest that was collected, if engines keep its columns

    def begin(self, version: int) -> None:
        """Start generating everything that the trainer may train on when it is at `version`."""
        for step in self._pending:
            if step.rollout.done() and isinstance(step.rollout.exception(), EngineLostError):
                self._start(step)  # it failed while nobody waited, and a sync has replaced the engine since
        newest = self._pending[-1].draw.version if self._pending else version - 1
        for later in range(newest + 1, min(version + self._max_staleness, self._steps - 1) + 1):
            self._pending.append(_Step(self._worker.draw(later), Future()))
            self._start(self._pending[-1])

    def collect(self, version: int) -> RolloutBatch:
        """Return the groups for the trainer at `version`, and start generating the groups of later steps. `time/generate` is the time
        waited here, `ahead/generate` and `ahead/reward` the time that sampling and scoring took. Raise the error of the generating
        threads. After an EngineLostError, here or when replicas fetch columns, call `collect` again once the engines serve again."""
        start = time.perf_counter()
        if self._collected is not None and self._collected.draw.version == version:
            self._pending.appendleft(self._collected)
        self.begin(version)
        step = self._pending[0]
        assert step.draw.version == version, f"the groups for version {step.draw.version} are next, not those for {version}"
        try:
            rollout = step.rollout.result()
            while self._worker.forget_lost(step.draw, rollout):  # with an engine that was lost
                self._start(step)
                rollout = step.rollout.result()
            self._worker.read_shown(rollout)
        except EngineLostError:
            wait([step.rollout for step in self._pending])  # they have ended or are lost too, so that one loss is recovered once
            raise
        self._pending.popleft()
        self._collected = step if any(completion.remote for completion in rollout.completions_B) else None
        if step.observed is None:
            step.observed = self._worker.observe(rollout, version)  # here and in order, because the next draw may depend on it
        return replace(rollout, sampling=rollout.sampling | step.observed, seconds={WAIT: time.perf_counter() - start, **rollout.seconds})

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes the state of the problem stream after the last collected groups."""
        return self._worker.snapshot([step.draw for step in self._pending])

    def evaluate(self, version: int) -> RolloutBatch:
        """See `RolloutWorker.evaluate`. Generation ahead shares the engines meanwhile."""
        return self._worker.evaluate(version)

    def close(self) -> None:
        """Abort running requests together with the engines, and wait for the threads to end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._worker.close()
        self._stop_engine()
        self._threads.shutdown(wait=True)

    def _start(self, step: _Step) -> None:
        step.rollout = self._threads.submit(self._worker.collect, step.draw)
