"""Metrics of the difference d between the trainer's and the engine's log-probs.

`mismatch/` covers tokens sampled by the trainer's own policy version and shows whether trainer and engine are the same policy. For a stale
token, d also contains the optimizer steps since it was sampled, so `staleness/` measures stale tokens separately.
"""

import math
from collections.abc import Callable, Mapping

import torch

from megatron_rl.algorithm.kl import k3
from megatron_rl.batch.totals import Combine, Totals, combine_alone
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.sync import SyncConfig
from megatron_rl.errors import MismatchError, RunError
from megatron_rl.metrics import declare

_DIFFERENCE, _PANEL, _UNREPLAYED = "|log p trainer - log p engine|", "|Δ log p| (nats)", "without routing replay"
_MEAN = f"mean {_DIFFERENCE} over the tokens of the trainer's version"
MISMATCH = (
    declare("mismatch/abs_mean", _MEAN, "nats", _PANEL, label="mean over tokens", progress="[cyan]mismatch mean {:.1e}"),
    declare("mismatch/abs_max", f"largest {_DIFFERENCE} of a token", "nats", _PANEL, label="largest", progress="[cyan]max {:.1e}"),
    declare(
        "mismatch/k3_kl", "k3 estimate of KL(rollout || trainer) per token", "nats", "KL (nats per token)", label="KL(rollout ‖ trainer)"
    ),
)
TOKENS = declare("mismatch/tokens", "sampled tokens whose log-probs were compared; if none could be, those of the canary", "count")
WITHOUT_REPLAY = (
    declare("mismatch/without_replay/abs_mean", f"mean {_DIFFERENCE}, {_UNREPLAYED}", "nats", _PANEL, label="mean without routing replay"),
    declare("mismatch/without_replay/abs_max", f"largest {_DIFFERENCE}, {_UNREPLAYED}", "nats"),
    declare("mismatch/without_replay/k3_kl", f"k3 estimate of KL(rollout || trainer), {_UNREPLAYED}", "nats"),
)
UNCOMPARED_STEPS = 3
"""Steps after which a bound counts as exceeded if no token was compared in any of them."""
SAMPLE_BIN = 32  # positions per bin of the mismatch in samples.jsonl
_BOUNDS = torch.tensor([32 << power for power in range(26)])  # positions at which responses are cut into bins for the metrics
_POSITION = "at response positions from {} to twice that (before 32 for 0)"
BY_POSITION = (
    declare("mismatch/position/{}/abs_mean", f"mean {_DIFFERENCE} {_POSITION}", "nats", "|Δ log p| by position (nats)", label="from {}"),
    declare("mismatch/position/{}/tokens", f"sampled tokens {_POSITION}", "count"),
)
_AGE = "age (policy versions)"
AGES = (
    declare("staleness/mean", "mean age of a sampled token, in policy versions", "number", _AGE),
    declare("staleness/max", "age of the oldest sampled token, in policy versions", "count", _AGE, label="oldest"),
    declare("staleness/share", "share of tokens that an older version sampled", "share"),
    declare("staleness/mixed", "share of completions sampled by several versions", "share"),
)
STALE_MISMATCH = (
    declare("staleness/abs_mean", f"mean {_DIFFERENCE} over the stale tokens", "nats"),
    declare("staleness/k3_kl", "k3 estimate of KL(rollout || trainer) per stale token", "nats"),
)


def measure_mismatch(
    samples: list[TrainingSample], names: tuple[str, ...] = MISMATCH, by_position: bool = False, combine: Combine = combine_alone
) -> dict[str, float]:
    """Return |d| and the k3 estimate of KL(engine || trainer) over all replicas' tokens of the trainer's own version, or {} without any.
    `samples` are this replica's. With `by_position`, also return the mean |d| by position in the response."""
    difference, lags = _flatten(samples)
    current, totals, starts = difference[lags == 0], Totals(), [0, *_BOUNDS.tolist()]
    totals.add("abs", current.abs())
    totals.add("k3", k3(current))
    if by_position and len(current):
        bins = torch.bucketize(torch.cat([_positions(sample) for sample in samples])[lags == 0], _BOUNDS, right=True)
        for number in bins.unique().tolist():  # bins double in length, so long responses add few
            totals.add(BY_POSITION[0].format(starts[number]), current[bins == number].abs())
    totals = combine(totals)
    if not totals.count("abs"):
        return {}
    metrics = dict(zip(names, (totals.mean("abs"), totals.largest("abs"), totals.mean("k3")), strict=True))
    if names == MISMATCH:
        metrics[TOKENS] = float(totals.count("abs"))
    for start in starts:
        mean, tokens = (name.format(start) for name in BY_POSITION)
        if totals.count(mean):
            metrics |= {mean: totals.mean(mean), tokens: float(totals.count(mean))}
    return metrics


class MismatchBound:
    """Stops the run, or warns, if the mismatch exceeds `sync.max_mismatch`."""

    def __init__(self, settings: SyncConfig, exact: bool, notify: Callable[[str], None]) -> None:
        """Create the bound. `exact` says that the run promises identical bits, so the default bound is 0."""
        bound = settings.max_mismatch
        self._bound = bound if bound is not None else 0.0 if exact else math.inf
        self._stops, self._notify, self._warned = settings.on_mismatch == "stop", notify, False
        self._uncompared = 0  # steps since tokens were compared last

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check the metrics of a step, which are the same on every rank. Raise MismatchError if the mismatch exceeds the bound; or, with
        `on_mismatch = "warn"`, warn once until it is below the bound again. Raise RunError, or warn, if no token was compared for
        `UNCOMPARED_STEPS` steps, because the bound then says nothing."""
        largest = metrics.get(MISMATCH[1])
        self._count(largest is not None or bool(metrics.get(TOKENS)))  # `TOKENS` alone are the canary's
        if largest is None:  # no token of the trainer's version
            return
        exceeded = not largest <= self._bound
        line = f"the mismatch of rollout and trainer is {largest:.3g} nats (mismatch/abs_max), above sync.max_mismatch = {self._bound:g}"
        if exceeded and self._stops:
            raise MismatchError(f"{line}: the engine does not compute what the trainer does")
        if exceeded and not self._warned:
            self._notify(line)
        self._warned = exceeded

    def _count(self, compared: bool) -> None:
        self._uncompared = 0 if compared else self._uncompared + 1
        if math.isinf(self._bound) or self._uncompared < UNCOMPARED_STEPS:
            return
        line = f"no token of the trainer's version was compared for {UNCOMPARED_STEPS} steps (mismatch/tokens)"
        if self._stops:
            raise RunError(f"{line}, so sync.max_mismatch = {self._bound:g} bounds nothing; set sync.canary above 0, or the bound to inf")
        if self._uncompared == UNCOMPARED_STEPS:
            self._notify(line)


def bin_mismatch(sample: TrainingSample) -> list[tuple[int, float]]:
    """Return (sampled tokens of the trainer's own version, their mean |d|) for every `SAMPLE_BIN` positions of a response."""
    difference, lags = _flatten([sample])
    bins, current = _positions(sample) // SAMPLE_BIN, lags == 0
    counts, sums = bins[current].bincount(), bins[current].bincount(difference[current].abs().double())
    return [(count, total / max(count, 1)) for count, total in zip(counts.tolist(), sums.tolist(), strict=True)]


def find_worst_prefix(samples: list[TrainingSample]) -> list[int]:
    """Return the tokens before the sampled token of the trainer's own version with the largest |d|, or [] without such tokens."""
    worst, prefix = -1.0, list[int]()
    for sample in samples:
        difference, lags = _flatten([sample])
        difference = difference.abs().nan_to_num(nan=math.inf).masked_fill(lags != 0, -1.0)
        if len(difference) and float(difference.max()) > worst:
            worst = float(difference.max())
            prefix = sample.ids[: int(sample.target_positions[difference.argmax()]) + 1].tolist()
    return prefix


def _positions(sample: TrainingSample) -> torch.Tensor:
    """Return the positions of the sampled tokens in the response, int64 [A]."""
    return sample.target_positions - (len(sample.prompt_ids) - 1)


def measure_staleness(samples: list[TrainingSample], combine: Combine = combine_alone) -> dict[str, float]:
    """Return, over all replicas, the tokens' ages in policy versions, the share of stale tokens with their |d| and k3, and the share of
    completions that several versions sampled."""
    (difference, lags), totals = _flatten(samples), Totals()
    totals.add("lag", lags)
    totals.add("stale", lags > 0)
    totals.add("mixed", torch.tensor([len(sample.version_lags.unique()) > 1 for sample in samples]))
    totals.add("abs", difference[lags > 0].abs())
    totals.add("k3", k3(difference[lags > 0]))
    totals = combine(totals)
    ages = totals.mean("lag"), totals.largest("lag"), totals.mean("stale"), totals.mean("mixed")
    stale = zip(STALE_MISMATCH, (totals.mean("abs"), totals.mean("k3")), strict=True) if totals.count("abs") else ()
    return dict(zip(AGES, ages, strict=True)) | dict(stale)


def _flatten(samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (d float32, version lags) [N] over all sampled tokens."""
    empty = torch.empty(0)
    difference = torch.cat([empty, *(sample.old_logprobs - sample.rollout_logprobs for sample in samples)])
    lags = [sample.version_lags if len(sample.version_lags) else torch.zeros(len(sample.old_logprobs)) for sample in samples]
    return difference, torch.cat([empty, *lags])
