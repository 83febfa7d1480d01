"""Replay: which groups are trained on again, how often and how old, and that a resumed run replays the same groups."""

import random
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.batch.replay import ReplayBuffer, ReplayFile, read_groups
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.replay import ReplayConfig
from megatron_rl.types import KeptTokens


def group(seed: str, rewards: list[float], lag: int = 0, **values) -> list[TrainingSample]:
    """Return samples whose first token is the member's number and whose log-probs depend on `seed`. All tokens are `lag` versions old."""
    rng, mean = random.Random(seed), sum(rewards) / len(rewards)
    return [
        TrainingSample(
            torch.tensor([number, 5]),
            torch.tensor([rng.randrange(9) for _ in range(number + 1)]),
            advantage=reward - mean,
            reward=reward,
            rollout_logprobs=torch.tensor([-rng.random() for _ in range(number + 1)]),
            version_lags=torch.full((number + 1,), lag, dtype=torch.uint8) if lag else torch.empty(0),
            **values,
        )
        for number, reward in enumerate(rewards)
    ]


def step(buffer: ReplayBuffer, version: int, groups: list[list[TrainingSample]], updates: int = 1):
    """Return the mini-batches of a step over `groups`, and its metrics."""
    each = len(groups) // updates
    mini_batches = [[sample for members in groups[start : start + each] for sample in members] for start in range(0, len(groups), each)]
    return mini_batches, buffer.extend(mini_batches, groups, version)


def content(sample: TrainingSample) -> dict:
    """Return all fields of a sample in comparable form."""
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    kept = values.pop("kept_tokens")
    values["kept_tokens"] = kept and (kept.counts.tolist(), kept.ids.tolist())
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def test_a_replayed_group_is_unchanged_but_older():
    buffer, (own,) = ReplayBuffer(ReplayConfig(prompts_per_step=1, max_staleness=3)), [group("a", [0.0, 1.0], lag=1)]
    ((first,), metrics) = step(buffer, 7, [own])
    assert first == own and metrics == {"replay/groups": 0, "replay/kept": 1, "replay/share": 0}
    ((_, _, *again),), metrics = step(buffer, 9, [group("b", [1.0, 1.0])])
    assert [sample.version_lags.tolist() for sample in again] == [[3], [3, 3]] and again[0].version_lags.dtype == torch.uint8
    assert [sample.number for sample in again] == [2, 3], "numbered after the step's own"
    for sample, original in zip(again, own, strict=True):
        assert content(sample) | {"number": 0, "version_lags": 0} == content(original) | {"version_lags": 0}
    assert metrics == {"replay/groups": 1, "replay/kept": 0, "replay/share": 0.5, "replay/age": 2}


def test_groups_with_a_gradient_are_kept_newest_first_then_by_the_largest_spread():
    buffer, spread = ReplayBuffer(ReplayConfig(prompts_per_step=4)), group("a", [0.0, 1.0, 1.0])
    spread[2].masked = True
    excluded = group("b", [0.0, 1.0])
    for sample in excluded:
        sample.excluded = True
    step(buffer, 0, [spread, group("c", [1.0, 1.0]), excluded])
    assert [kept.samples for kept in buffer.groups] == [tuple(spread[:2])]
    buffer = ReplayBuffer(ReplayConfig(prompts_per_step=1, buffer_size=3, max_replays=2))
    step(buffer, 0, [group("old", [0.0, 1.0]), group("older", [0.0, 1.0])])
    step(buffer, 1, [group("mild", [0.0, 0.5]), group("wide", [0.0, 1.0])])
    kept = [(each.version, each.spread, each.replays) for each in buffer.groups]
    assert kept == [(1, 0.5, 0), (1, 0.25, 0), (0, 0.5, 1)]


def test_whole_groups_are_spread_over_the_mini_batches_and_a_buffer_smaller_than_a_step_is_refused():
    buffer = ReplayBuffer(ReplayConfig(prompts_per_step=3))
    step(buffer, 0, [group(str(number), [0.0, 1.0]) for number in range(4)])
    mini_batches, _ = step(buffer, 1, [group(str(number), [1.0, 1.0]) for number in range(4)], updates=2)
    lags = [[sample.version_lags.tolist()[:1] for sample in mini_batch] for mini_batch in mini_batches]
    assert lags == [[[]] * 4 + [[1]] * 4, [[]] * 4 + [[1]] * 2]
    with pytest.raises(ValueError, match=re.escape("buffer_size (2) must not be less than prompts_per_step (3)")):
        ReplayConfig(prompts_per_step=3, buffer_size=2)


class Run:
    """Runs steps with replay. Each step returns the samples that it trained on."""

    def __init__(self, settings: ReplayConfig, ahead: int) -> None:
        self.buffer, self.ahead, self.max_replays = ReplayBuffer(settings), ahead, settings.max_replays

    def step(self, version: int) -> list[dict]:
        rng = random.Random(version)
        groups = [
            group(f"{version}/{number}", [float(rng.random() < 0.5) for _ in range(3)], rng.randint(0, self.ahead)) for number in range(4)
        ]
        mini_batches, _ = step(self.buffer, version, groups, updates=2)
        return [content(sample) for mini_batch in mini_batches for sample in mini_batch]


SETTINGS = st.builds(
    ReplayConfig,
    prompts_per_step=st.integers(1, 3),
    max_staleness=st.integers(2, 6),
    max_replays=st.integers(1, 3),
    buffer_size=st.integers(3, 9),
)


@given(SETTINGS, st.integers(0, 1), st.sets(st.integers(1, 9)))
def test_a_resumed_run_replays_the_same_groups(settings, ahead, kills):
    whole, run = Run(settings, ahead), Run(settings, ahead)
    expected, trained = [whole.step(version) for version in range(10)], []
    for version in range(10):
        if version in kills:  # the step after the snapshot is lost
            snapshot = run.buffer.groups
            run.step(version)
            run = Run(settings, ahead)
            with TemporaryDirectory() as folder:
                names = ReplayFile(snapshot).write(Path(folder))
                assert bool(snapshot) == (names == ["replay.npz"])
                run.buffer.groups = read_groups(Path(folder))
        trained.append(run.step(version))
    assert trained == expected
    seen = [(sample["prompt_ids"], tuple(sample["rollout_logprobs"])) for samples in trained for sample in samples]
    assert max(seen.count(each) for each in seen) <= 1 + settings.max_replays
    again = [sample for samples in trained for sample in samples if sample["number"] >= 4 * 3]
    assert again and all(max(sample["version_lags"]) <= settings.max_staleness for sample in again)
    assert len(run.buffer.groups) <= settings.buffer_size and all(one.version >= two.version for one, two in pairwise(run.buffer.groups))


def test_a_file_holds_every_column(tmp_path):
    buffer = ReplayBuffer(ReplayConfig(prompts_per_step=1))
    routed = group("a", [0.0, 1.0], response_mask=[True], routed_experts=torch.arange(12, dtype=torch.int16).view(2, 3, 2))
    routed[0].kept_tokens = KeptTokens(np.array([2], np.int32), np.array([7, 8], np.int32))
    step(buffer, 0, [routed, group("b", [0.25, 1.0], lag=1)])
    file = ReplayFile(buffer.groups)
    file.write(tmp_path)
    assert file.nbytes < (tmp_path / "replay.npz").stat().st_size
    read = read_groups(tmp_path)
    for one, two in zip(read, buffer.groups, strict=True):
        assert (one.version, one.oldest, one.spread, one.replays) == (two.version, two.oldest, two.spread, two.replays)
        for loaded, original in zip(one.samples, two.samples, strict=True):
            assert content(loaded) == content(original)
    assert read[0].samples[0].routed_experts.dtype == torch.int16
