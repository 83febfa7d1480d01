"""Which tokens a run that samples ahead compares, and when its bound fails because none were. Real runs: test_sampling_ahead.py."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.config import Config
from megatron_rl.config.sync import SyncConfig
from megatron_rl.diagnosis.mismatch import MISMATCH, TOKENS, UNCOMPARED_STEPS, MismatchBound
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.rollout.worker import AsyncRolloutWorker, StepDraw, _Step
from megatron_rl.training import newest_tokens
from megatron_rl.training.newest_tokens import MOST, NewestTokens
from megatron_rl.types import Completion, Problem, RemoteColumns

VERSION = 5
PROBLEM = Problem("p", "p", "")


def completion(lags: list[int], logprob: float = -1.0) -> Completion:
    """Return a completion for a trainer of version `VERSION` + 1."""
    count = len(lags)
    values = np.full(count, logprob, np.float32)
    made = Completion(PROBLEM, np.array([1, 2], np.int32), np.full(count, 7, np.int32), values, "stop", VERSION, "")
    made.version_lags_T = np.array(lags, np.uint8)
    return made


def make(monkeypatch, groups: list[list[Completion]], bound: float = 0.0, ahead: int = 1) -> tuple[NewestTokens, SimpleNamespace]:
    """Return the comparison of a trainer whose log-probs are all -1, and what it has asked for."""
    asked = SimpleNamespace(samples=[], canaries=[], canary_tokens=4)
    worker = AsyncRolloutWorker.__new__(AsyncRolloutWorker)
    worker._pending = [_Step(StepDraw(VERSION + 1, [], 0, {0: dict(enumerate(groups))}), None)]

    def compute_logprobs(samples):
        asked.samples += samples
        return [torch.full((sample.sampled_count,), -1.0) for sample in samples], 0.0

    def ask_canary(version: int) -> int:
        asked.canaries.append(version)
        return asked.canary_tokens

    placement = {"kind": "disaggregated", "max_staleness": ahead} if ahead else {}
    algorithm = {"correction": "tis"}
    config = Config.model_validate({"model": {"path": "m"}, "placement": placement, "algorithm": algorithm}, strict=False)
    sync: Any = SimpleNamespace(ask_canary=ask_canary, run_with_recovery=lambda version, work: work())
    monkeypatch.setattr(newest_tokens, "share_out", lambda samples, fetch: list(samples))
    monkeypatch.setattr(newest_tokens.reduce, "combine", lambda totals: totals)
    actor: Any = SimpleNamespace(compute_logprobs=compute_logprobs)
    exact = MismatchBound(SyncConfig(max_mismatch=bound), True, print)
    return NewestTokens(config, actor, Rank0(lambda: worker), sync, exact), asked


def test_tokens_of_the_trainers_version_are_compared_and_older_ones_are_not(monkeypatch):
    old, mixed = [completion([2, 2], -9.0)], [completion([2, 1, 1], -1.0)]
    newest, asked = make(monkeypatch, [old, mixed])
    mixed[0].logprobs_T[0] = -9.0  # by an older version
    metrics = newest.compare(VERSION)
    assert (metrics[TOKENS], metrics[MISMATCH[1]], len(asked.samples), asked.canaries) == (2, 0.0, 1, [])
    mixed[0].logprobs_T[2] = -1.5
    with pytest.raises(RunError, match=r"^the mismatch of rollout and trainer is 0\.5 nats"):
        newest.compare(VERSION)


def test_columns_at_the_engines_are_fetched_with_lags_from_the_trainers_version(monkeypatch):
    group = [completion([]) for _ in range(3)]
    for member, versions in zip(group, [(VERSION - 1,), (VERSION - 1, VERSION), (VERSION,)], strict=True):
        member.remote = RemoteColumns("", "", str(versions), 4, "", -1.0, versions, VERSION + 1)
    newest, _ = make(monkeypatch, [group])
    newest._worker.value._worker = SimpleNamespace(find_lost=lambda members: set())
    assert [(each.remote.versions, each.remote.trained_at) for each in newest._choose(VERSION)] == [((4, 5), VERSION), ((5,), VERSION)]
    newest._worker.value._worker.find_lost = lambda members: {"an engine was lost"}
    assert newest._choose(VERSION) == []


def test_few_of_the_last_groups_are_scored(monkeypatch):
    groups = [[completion([1], -1.0 if number > 4 else -9.0) for _ in range(3)] for number in range(8)]
    newest, asked = make(monkeypatch, groups)
    assert newest.compare(VERSION)[TOKENS] == MOST == len(asked.samples)


def test_the_canary_is_asked_if_nothing_has_ended(monkeypatch):
    newest, asked = make(monkeypatch, [[completion([2])]])
    assert newest.compare(VERSION) == {TOKENS: 4.0} and asked.canaries == [VERSION] and not asked.samples


def test_only_runs_ahead_whose_step_has_compared_nothing_need_it(monkeypatch):
    ahead, alternating = (make(monkeypatch, [], ahead=staleness)[0] for staleness in (1, 0))
    assert [newest.is_needed(metrics) for newest in (ahead, alternating) for metrics in ({}, {TOKENS: 3.0})] == [True, False, False, False]


@pytest.mark.parametrize("how", ["stop", "warn"])
def test_a_bound_that_holds_for_no_token_fails(how):
    lines = list[str]()
    bound = MismatchBound(SyncConfig(on_mismatch=how), True, lines.append)
    for metrics in [{}, {}, {TOKENS: 1.0}] + [{}] * (UNCOMPARED_STEPS - 1):
        bound.check(metrics)
    line = f"no token of the trainer's version was compared for {UNCOMPARED_STEPS} steps (mismatch/tokens)"
    if how == "stop":
        with pytest.raises(RunError, match=r"set sync\.canary above 0") as caught:
            bound.check({TOKENS: 0.0})
        assert str(caught.value).startswith(line)
    else:
        for _ in range(5):
            bound.check({})
        assert lines == [line]
    free = MismatchBound(SyncConfig(max_mismatch=math.inf), True, lines.append)
    for _ in range(2 * UNCOMPARED_STEPS):
        free.check({})
