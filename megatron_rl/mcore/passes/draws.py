"""Repeats draws: what the trainer's distribution over the kept tokens says of sampled tokens, beside their log-probs.

The tokens that a random number u in [0, 1) may draw lie one behind the other, in the order of their ids, each as wide as its probability.
Tensor-parallel ranks exchange eight numbers for each checked token, so that no rank gathers a row of probabilities. This costs a softmax in
FP64, which is why only a share of the tokens is checked on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.kernels.device_copy import copy_to_device

FIELDS = ("place", "number", "spread", "token", "drawn", "below", "probability", "logprob", "entropy", "variance")
FILTER_FIELDS = ("kept", "mass", "most", "lowest", "left_out")
"""Columns of `DrawRecord.rows`. place: `MicroBatch.token_indices`. number, spread: `TrainingSample.draws`. drawn: the token that `number`
draws, -1 if it is unknown. below: probability of all ids below the token's. entropy, variance: mean and variance of -log p. kept: number of
kept tokens, 0 if all are. Of the whole distribution: mass: probability of the kept tokens. most: that of the most probable token. lowest,
left_out: log p of the least probable kept token and of the most probable other token, relative to the most probable token."""


@dataclass
class DrawRecord:
    """What a rank's last pass has found, on its device. Tensor-parallel ranks hold the same rows."""

    rows: list[torch.Tensor] = field(default_factory=list)  # float64 [n, fields]
    sums: torch.Tensor | None = None  # float64 [2, vocab / tp]: expected and actual number of each token, of this rank's vocabulary

    def reset(self) -> None:
        """Forget a pass that is repeated."""
        self.rows, self.sums = [], None


@dataclass
class Draws:
    """The checked rows of `Targets`, chosen on the host."""

    rows: torch.Tensor  # int64 [c], ascending, on the host
    about: torch.Tensor  # float64 [c, 3]: place, number, spread
    record: DrawRecord

    @classmethod
    def choose(cls, draws: torch.Tensor, places: torch.Tensor, record: DrawRecord) -> Draws:
        """Return the checked ones among `draws` [n, 2] at `places` [n], on the host."""
        draws = draws.view(-1, 2)  # empty if no sample of a micro-batch has any
        rows = (~draws[:, 1].isnan()).nonzero().squeeze(1)
        return cls(rows, torch.cat([places[rows, None].double(), draws[rows]], 1), record)

    def __getitem__(self, part: slice) -> Draws:
        first, end = torch.searchsorted(self.rows, torch.tensor([part.start, part.stop])).tolist()
        return Draws(self.rows[first:end] - part.start, self.about[first:end], self.record)

    @torch.no_grad()
    def add(self, logits: torch.Tensor, targets: Any) -> None:
        """Record the draws of logits [n, vocab / tp] with their n `passes.logprobs.Targets`. Collective among tensor-parallel ranks."""
        size, rank = logits.shape[-1], parallel_state.get_tensor_model_parallel_rank()
        if self.record.sums is None:
            self.record.sums = torch.zeros(2, size, dtype=torch.float64, device=logits.device)
        if not len(self.rows):
            return
        rows, about = (copy_to_device(values, logits.device) for values in (self.rows, self.about))
        targets = targets.choose(rows)
        scaled = targets.scale(logits[rows])
        largest = _reduce(scaled.amax(-1), dist.ReduceOp.MAX)
        shifted = scaled - largest.unsqueeze(-1)
        kept = targets.keep(shifted)
        weights = kept.exp()
        cumulated = weights.cumsum(-1, dtype=torch.float64)
        totals = cumulated.new_zeros(parallel_state.get_tensor_model_parallel_world_size(), len(rows))
        totals[rank] = cumulated[:, -1]
        _reduce(totals)
        before, total = totals[:rank].sum(0), totals.sum(0)
        thresholds = about[:, 1] * total - before
        drawn = torch.searchsorted(cumulated, thresholds.unsqueeze(-1), right=True).squeeze(-1)
        drawn = torch.where((about[:, 1] >= 0) & (thresholds >= 0) & (drawn < size), drawn + rank * size, -1).double()
        columns, (column, is_here) = targets.find_columns(size).unsqueeze(-1), targets.find(size)
        at = weights.gather(-1, column).double() * is_here
        below = cumulated.gather(-1, (columns - 1).clamp(0, size - 1)) * (columns > 0)
        whole, lowest, left_out = totals[rank].unsqueeze(-1), torch.zeros_like(total), torch.zeros_like(total)
        logs = kept
        if targets.kept is not None:
            is_out = kept.isneginf()
            whole, logs = shifted.exp().sum(-1, True, dtype=torch.float64), kept.masked_fill(is_out, 0.0)
            lowest, left_out = kept.masked_fill(is_out, torch.inf).amin(-1), shifted.masked_fill_(~is_out, -torch.inf).amax(-1)
        weighted = logs * weights
        moments = [values.sum(-1, True, dtype=torch.float64) for values in (weighted, weighted * logs)]
        below, at, first, second, whole = _reduce(torch.cat([below, at, *moments, whole], -1)).unbind(-1)
        extremes = _reduce(torch.stack([drawn, -lowest.double(), left_out.double()], -1), dist.ReduceOp.MAX)
        first, counts = first / total, torch.zeros_like(total) if targets.kept is None else (targets.kept >= 0).sum(-1).double()
        found = [targets.tokens.double(), extremes[:, 0], below / total, at / total, (at / total).log(), total.log() - first]
        found += [second / total - first.square(), counts, total / whole, 1 / whole, -extremes[:, 1], extremes[:, 2]]
        self.record.rows.append(torch.cat([about, torch.stack(found, -1)], -1))
        self.record.sums[0] += (1 / total).float() @ weights
        self.record.sums[1].index_add_(0, column[:, 0], is_here[:, 0].double())


def _reduce(values: torch.Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(values, operation, group=parallel_state.get_tensor_model_parallel_group())
    return values
