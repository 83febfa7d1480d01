"""Replay buffer on rank 0: groups that later steps train on again. A group is kept as it was sampled. The trainer treats a replayed group
like a group that was sampled ahead of time (`placement.max_staleness`): importance ratios are computed against the policy that sampled it,
and precision metrics do not count it. `groups` is never modified in place, so a checkpoint takes a snapshot at no cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.replay import ReplayConfig
from megatron_rl.metrics import declare
from megatron_rl.types import KeptTokens

_METRICS = (
    declare("replay/groups", "kept groups that the step trained on again", "count", "groups", label="trained on again"),
    declare("replay/kept", "groups in the buffer after the step", "count", "groups", label="kept"),
    declare("replay/share", "share of the step's tokens from replayed groups", "share", "share of the tokens", label="replayed"),
    declare("replay/age", "mean age of replayed groups, in steps since they were first trained on", "number", "age (steps)"),
)
_FILE = "replay.npz"
_COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "version_lags", "response_mask", "routed_experts")
_NUMBERS = ("advantage", "reward")
_KEPT_TOKENS = ("kept_tokens.counts", "kept_tokens.ids")


@dataclass(frozen=True)
class KeptGroup:
    """A group as it was first trained on, without members that contribute no gradient."""

    samples: tuple[TrainingSample, ...]
    version: int  # the trainer's policy version when the group was first trained on
    oldest: int  # policy version of its oldest token
    spread: float  # standard deviation of its rewards
    replays: int = 0

    def at(self, version: int) -> list[TrainingSample]:
        """Return its samples with the version lags for a trainer at `version`."""
        none = (torch.zeros(sample.sampled_count, dtype=torch.uint8) for sample in self.samples)
        lags = [sample.version_lags if len(sample.version_lags) else zeros for sample, zeros in zip(self.samples, none, strict=True)]
        return [replace(sample, version_lags=lag + (version - self.version)) for sample, lag in zip(self.samples, lags, strict=True)]


class ReplayBuffer:
    """Keeps the newest groups. Among the groups of one step it prefers those whose rewards differ most."""

    def __init__(self, settings: ReplayConfig) -> None:
        self._settings = settings
        self.groups: tuple[KeptGroup, ...] = ()

    def extend(
        self, mini_batches: Sequence[list[TrainingSample]], own: Iterable[Sequence[TrainingSample]], version: int
    ) -> dict[str, float]:
        """Add kept groups to the mini-batches of the step at `version`, then keep its `own` groups with nonzero advantages; return
        metrics."""
        taken, numbers = self._take(version), count(sum(map(len, mini_batches)))
        sampled, replayed = sum(sample.sampled_count for each in mini_batches for sample in each), 0
        for index, group in enumerate(taken):
            for sample in group.at(version):
                sample.number = next(numbers)
                replayed += sample.sampled_count
                mini_batches[index * len(mini_batches) // len(taken)].append(sample)
        self._keep(own, version)
        age = sum(version - group.version for group in taken) / max(len(taken), 1)
        values = (float(len(taken)), float(len(self.groups)), replayed / max(sampled + replayed, 1), age)
        return dict(zip(_METRICS if taken else _METRICS[:3], values, strict=False))

    def _take(self, version: int) -> list[KeptGroup]:
        settings = self._settings
        fit = [group for group in self.groups if version - group.oldest <= settings.max_staleness]
        taken, others = fit[: settings.prompts_per_step], fit[settings.prompts_per_step :]
        again = (replace(group, replays=group.replays + 1) for group in taken)
        self.groups = (*(group for group in again if group.replays < settings.max_replays), *others)
        return taken

    def _keep(self, groups: Iterable[Sequence[TrainingSample]], version: int) -> None:
        kept = [*self.groups]
        for members in groups:
            samples = tuple(sample for sample in members if not (sample.excluded or sample.masked))
            if any(sample.advantage for sample in samples):
                oldest = version - max(int(sample.version_lags.max()) if len(sample.version_lags) else 0 for sample in samples)
                kept.append(KeptGroup(samples, version, oldest, float(np.std([sample.reward for sample in samples]))))
        self.groups = tuple(sorted(kept, key=lambda group: (-group.version, -group.spread))[: self._settings.buffer_size])


class ReplayFile:
    """The buffer's groups as a checkpoint's file `replay.npz`, which holds only arrays. Without groups there is no file."""

    def __init__(self, groups: Sequence[KeptGroup]) -> None:
        self._groups = groups

    @property
    def nbytes(self) -> int:
        samples = [sample for group in self._groups for sample in group.samples]
        drawn_from = sum(kept.counts.nbytes + kept.ids.nbytes for sample in samples if (kept := sample.kept_tokens) is not None)
        return drawn_from + sum(getattr(sample, name).nbytes for sample in samples for name in _COLUMNS)

    def write(self, to: Path) -> list[str]:
        """Write the file into a checkpoint's folder. Return its name. Raise OSError."""
        if not self._groups:
            return []
        samples = [sample for group in self._groups for sample in group.samples]
        drawn_from = [sample.kept_tokens or KeptTokens(*[np.empty(0, np.int32)] * 2) for sample in samples]
        arrays: dict[str, Any] = {_KEPT_TOKENS[0]: [each.counts for each in drawn_from], _KEPT_TOKENS[1]: [each.ids for each in drawn_from]}
        arrays |= {name: [getattr(sample, name).numpy() for sample in samples] for name in _COLUMNS}
        columns: dict[str, Any] = {}
        for name, parts in arrays.items():
            columns[name] = np.concatenate([part for part in parts if len(part)] or parts[:1])
        columns |= {f"{name}.lengths": np.array([len(part) for part in parts]) for name, parts in arrays.items()}
        columns |= {name: np.array([getattr(sample, name) for sample in samples]) for name in _NUMBERS}
        columns["kept_tokens.known"] = np.array([sample.kept_tokens is not None for sample in samples])
        columns["groups"] = np.array([(len(group.samples), group.version, group.oldest, group.replays) for group in self._groups])
        columns["groups.spread"] = np.array([group.spread for group in self._groups])
        np.savez(to / _FILE, **columns)
        return [_FILE]


def read_groups(checkpoint: Path) -> tuple[KeptGroup, ...]:
    """Return the groups stored in a checkpoint."""
    if not (checkpoint / _FILE).is_file():
        return ()
    with np.load(checkpoint / _FILE) as file:
        stored = {name: file[name] for name in file.files}
    parts = {name: np.split(stored[name], np.cumsum(stored[f"{name}.lengths"])[:-1]) for name in (*_COLUMNS, *_KEPT_TOKENS)}
    samples, groups = list[TrainingSample](), list[KeptGroup]()
    for index, known in enumerate(stored["kept_tokens.known"].tolist()):
        values: dict[str, Any] = {name: torch.from_numpy(parts[name][index]) for name in _COLUMNS}
        values |= {name: stored[name][index].item() for name in _NUMBERS}
        kept = KeptTokens(*(parts[name][index] for name in _KEPT_TOKENS)) if known else None
        samples.append(TrainingSample(**values, kept_tokens=kept))
    for (size, version, oldest, replays), spread in zip(stored["groups"].tolist(), stored["groups.spread"].tolist(), strict=True):
        groups.append(KeptGroup(tuple(samples[:size]), version, oldest, spread, replays))
        del samples[:size]
    return tuple(groups)
