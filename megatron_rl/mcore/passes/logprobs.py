"""Log-probs and entropies from the final hidden states and the output layer's weight, without storing all logits.

Logits are computed in chunks of `LOGITS_PER_CHUNK`, scored and dropped. The forward pass keeps each token's log-sum-exp; the backward
pass recomputes a chunk's logits and multiplies their gradient into those of hidden states and weight. Memory is thus independent of
tokens x vocabulary, for one more matrix product. Tensor-parallel ranks share the vocabulary and exchange maxima and sums per chunk.

On a CPU, the log-probs equal those of the engine's operator bit for bit, for any chunk size and number of ranks. On a GPU, fused kernels
(`kernels.vocabulary`) score a chunk and differentiate it in place, unless a filter kept only some tokens (`Targets.kept`): then PyTorch's
operators differentiate. The kernels can also reuse logits kept by the forward pass (`keep_logits`), which saves the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.packing import LOGITS_PER_CHUNK, LOGITS_PER_GPU_CHUNK
from megatron_rl.kernels import plain
from megatron_rl.kernels.batch_invariant import MIN_ROWS, invariant_matmul
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.kernels.vocabulary import reference as vocabulary
from megatron_rl.mcore.base.weight_gradient import WeightGradient
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.draws import Draws
from megatron_rl.precision.threads import all_threads

_LOGITS_IN_CACHE = 1 << 19
_TILE = 128  # tile height of GPU matrix products


@dataclass(frozen=True)
class Targets:
    """The n tokens to score, under softmax(logits / temperature) over the kept tokens."""

    tokens: torch.Tensor  # int64 [n]
    temperature: float
    kept: torch.Tensor | None = None  # int32 [n, most] like `MicroBatch.kept_tokens`, or None if all tokens are kept
    draws: Draws | None = None  # which of them to record while they are scored

    def __getitem__(self, rows: slice) -> Targets:
        return replace(self.choose(rows), draws=None if self.draws is None else self.draws[rows])

    def choose(self, rows: slice | torch.Tensor) -> Targets:
        """Return some of the targets, without records of draws."""
        return Targets(self.tokens[rows], self.temperature, None if self.kept is None else self.kept[rows])

    def record_draws(self, logits: torch.Tensor) -> None:
        """Record the draws of all rows with their logits [n, vocab / tp]."""
        if self.draws is not None:
            self.draws.add(logits, self)

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits / temperature in FP32."""
        return logits.float() if self.temperature == 1.0 else logits.float() / self.temperature

    def keep(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the logits with -inf for tokens that are not kept. Rows without kept tokens keep all."""
        if self.kept is None:
            return scaled
        size = scaled.shape[-1]
        local = self.kept.long() - parallel_state.get_tensor_model_parallel_rank() * size
        elsewhere = (self.kept < 0) | (local < 0) | (local >= size)
        left_out = (self.kept[:, :1] >= 0).expand(-1, size + 1).clone()  # the last column takes tokens of other ranks
        return scaled.masked_fill(left_out.scatter_(-1, local.masked_fill(elsewhere, size), False)[:, :size], -torch.inf)

    def find_columns(self, size: int) -> torch.Tensor:
        """Return the tokens' columns [n] in this rank's `size` columns; out of range if another rank holds the token."""
        return self.tokens - parallel_state.get_tensor_model_parallel_rank() * size

    def find(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (columns [n, 1] clamped to this rank's `size` columns, bool [n, 1] whether this rank holds the token)."""
        columns = self.find_columns(size).unsqueeze(-1)
        return columns.clamp(0, size - 1), (columns >= 0) & (columns < size)


@dataclass(frozen=True)
class ScoredPositions:
    """The positions of a row [1, t / cp] whose target is a sampled token. Logits are computed only for them, not for prompts and
    padding."""

    index: torch.Tensor  # int64 [n], n >= 1
    length: int  # t / cp

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> ScoredPositions:
        """Return the positions where `mask` [1, t / cp] is nonzero."""
        index = mask[0].nonzero().squeeze(1)
        return cls(index if len(index) else index.new_zeros(1), mask.shape[1])

    def to(self, device: torch.device) -> ScoredPositions:
        """Return a copy on `device`."""
        return ScoredPositions(copy_to_device(self.index, device), self.length)

    def select(self, row: torch.Tensor) -> torch.Tensor:
        """Return [n, ...] of a row [1, t / cp, ...]."""
        return row[0, self.index]

    def select_targets(self, batch: MicroBatch, shard: ContextShard, temperature: float) -> Targets:
        """Return the n targets of a micro-batch."""
        kept = self.select(shard.select(batch.kept_tokens)) if len(batch.kept_tokens) else None
        return Targets(self.select(shard.select(batch.targets)), temperature, kept)

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Return the row [1, t / cp] with `values` [1, n] at the positions and 0 elsewhere, with gradient."""
        return values.new_zeros(1, self.length).index_copy(1, self.index, values)


def token_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, keep_logits: bool = False) -> torch.Tensor:
    """Return the log-probs of `targets`, float32 [n], with gradient. hidden [n, h] and weight [vocab / tp, h] have the same dtype. The
    gradient of `hidden` is this rank's summand of the tensor-parallel sum; that of `weight` goes to Megatron's buffer if there is one.
    `keep_logits` keeps n * vocab / tp logits for the fused backward kernel instead of recomputing them."""
    return _TokenScores.apply(hidden, weight, targets, False, keep_logits and torch.is_grad_enabled())[0]


def score_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, keep_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_logprobs` and the entropies in nats over all tokens, both float32 [n], with gradient. d entropy / d logit_j = -p_j (log
    p_j + entropy) / temperature."""
    logprobs, entropies = _TokenScores.apply(hidden, weight, targets, True, keep_logits and torch.is_grad_enabled())
    return logprobs, entropies


def _runs_kernels(hidden: torch.Tensor) -> bool:
    return hidden.is_cuda


def _is_fused(hidden: torch.Tensor, targets: Targets) -> bool:
    return _runs_kernels(hidden) and targets.kept is None


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, with_entropy: bool, keep_logits: bool
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.logits = []
        if _runs_kernels(hidden):
            keep = ctx.logits if keep_logits and targets.kept is None else None
            (logprobs, log_sums, entropies), of_all = _score_in_one_pass(hidden, weight, targets, with_entropy, keep)
            all_log_sums, entropies = of_all.log_sums, of_all.entropies
        elif with_entropy:
            logprobs, entropies, log_sums, all_log_sums = _score(hidden, weight, targets, _score_with_entropy)
        else:
            logprobs, log_sums = _score(hidden, weight, targets, _normalize)
        ctx.save_for_backward(hidden, weight, log_sums, *((entropies, all_log_sums) if with_entropy else ()))
        ctx.targets = targets
        return logprobs, entropies if with_entropy else None

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, of_entropies: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, log_sums, *of_all = ctx.saved_tensors
        gradient = torch.zeros_like(log_sums) if gradient is None else gradient
        dhidden, dweight = torch.empty_like(hidden), WeightGradient(weight) if ctx.needs_input_grad[1] else None
        fused = _is_fused(hidden, ctx.targets) and of_entropies is None  # the kernel differentiates log-probs only
        made, ctx.logits = ctx.logits[::-1] if fused else [], []  # their gradient is written in place
        for chunk in _cut_into_chunks(len(hidden), len(weight), fused):
            logits = made.pop() if made else hidden[chunk] @ weight.t()
            if fused:
                columns, temperature = ctx.targets[chunk].find_columns(len(weight)), ctx.targets.temperature
                vocabulary.differentiate_(logits, columns, log_sums[chunk], gradient[chunk], temperature)
            for rows in [] if fused else _cut_into_parts(logits):
                part = slice(chunk.start + rows.start, chunk.start + rows.stop)
                differentiated = _differentiate(logits[rows], ctx.targets[part], log_sums[part], gradient[part])
                if of_entropies is not None:
                    entropies, all_log_sums = (saved[part] for saved in of_all)
                    differentiated += _differentiate_entropy(logits[rows], ctx.targets, all_log_sums, entropies, of_entropies[part])
                logits[rows] = differentiated
            dhidden[chunk] = logits @ weight
            if dweight:
                dweight.add(logits, hidden[chunk])
            del logits  # free them before the next chunk
        return dhidden, dweight.finish() if dweight else None, None, None, None


def _differentiate(logits: torch.Tensor, targets: Targets, log_sums: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return gradient * (one-hot - softmax) / temperature, float32 [rows, vocab / tp]."""
    scaled = (gradient / targets.temperature).unsqueeze(-1)
    columns, is_here = targets.find(logits.shape[-1])
    probabilities = (targets.keep(targets.scale(logits)) - log_sums.unsqueeze(-1)).exp_()
    return probabilities.mul_(-scaled).scatter_add_(-1, columns, scaled * is_here)


def _differentiate_entropy(
    logits: torch.Tensor, targets: Targets, log_sums: torch.Tensor, entropies: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return gradient * d entropy / d logits, float32 [rows, vocab / tp]. `log_sums` is over all tokens."""
    logprobs = targets.scale(logits) - log_sums.unsqueeze(-1)
    scaled = (gradient / targets.temperature).unsqueeze(-1)
    return logprobs.exp().mul_(logprobs.add_(entropies.unsqueeze(-1))).mul_(-scaled)


def _cut(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _cut_into_chunks(count: int, width: int, fused: bool) -> list[slice]:
    rows = LOGITS_PER_GPU_CHUNK // width // _TILE * _TILE if fused else LOGITS_PER_CHUNK // width
    return _cut(count, max(MIN_ROWS, rows))


def _cut_into_parts(logits: torch.Tensor) -> list[slice]:
    """Return slices of a chunk's rows to score at a time: cache-sized on one CPU rank, else all rows."""
    is_local = parallel_state.get_tensor_model_parallel_world_size() == 1 and not logits.is_cuda
    return _cut(len(logits), max(1, _LOGITS_IN_CACHE // logits.shape[-1]) if is_local else len(logits))


_ScoreRows = Callable[[torch.Tensor, Targets], tuple[torch.Tensor, ...]]
"""(logits [rows, vocab / tp], targets) -> (log-probs, other values per row)."""


def _score(hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, score_rows: _ScoreRows) -> tuple[torch.Tensor, ...]:
    scores: list[tuple[torch.Tensor, ...]] = []
    for chunk in _cut_into_chunks(len(hidden), len(weight), False):
        logits = invariant_matmul(hidden[chunk], weight)
        with all_threads():
            for rows in _cut_into_parts(logits):
                part = slice(chunk.start + rows.start, chunk.start + rows.stop)
                scores.append(score_rows(logits[rows], targets[part]))
                targets[part].record_draws(logits[rows])
        del logits  # free them before the next chunk
    return tuple(torch.cat(numbers) for numbers in zip(*scores, strict=True))


def _score_in_one_pass(
    hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, with_entropy: bool, keep: list[torch.Tensor] | None
) -> tuple[vocabulary.RowScores, vocabulary.RowScores]:
    """Return scores [n] from the fused kernel, over kept tokens and, `with_entropy`, over all tokens, and append each chunk's logits to
    `keep`. Ranks exchange four numbers per token and part of the vocabulary."""
    ranks, filtered, summaries = parallel_state.get_tensor_model_parallel_world_size(), targets.kept is not None, list[torch.Tensor]()
    parts = vocabulary.count_parts(len(weight) * ranks, ranks)
    for chunk in _cut_into_chunks(len(hidden), len(weight), not filtered):
        rows, own = hidden[chunk], targets[chunk]
        logits = plain.multiply(rows, weight) if plain.takes(rows, weight) else rows @ weight.t()
        seen = [own.keep(logits), logits] if filtered and with_entropy else [own.keep(logits)]
        columns = own.find_columns(len(weight))
        summaries.append(torch.stack([vocabulary.summarize(each, columns, own.temperature, parts) for each in seen], -1))
        own.record_draws(logits)
        if keep is not None:
            keep.append(logits)
        del logits, seen  # free them before the next chunk
    local = torch.cat(summaries, 1)
    gathered = local
    if ranks > 1:
        gathered = local.new_empty(ranks * parts, *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local, group=parallel_state.get_tensor_model_parallel_group())
    scores = [vocabulary.combine(each) for each in gathered.unbind(-1)]
    return scores[0], scores[-1]


def _normalize(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probs, log-sum-exp)."""
    shifted, maxima = _shift(targets.keep(targets.scale(logits)))
    at_targets, sums = _add_over_ranks(_gather_local(shifted, targets), _sum(shifted.exp_()))
    log_sums = sums.log()
    return at_targets - log_sums, maxima + log_sums


def _score_with_entropy(logits: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, ...]:
    """Return (log-probs, entropies, log-sum-exp over kept tokens, log-sum-exp over all tokens)."""
    shifted, maxima = _shift(targets.scale(logits))
    at_targets, weights = _gather_local(shifted, targets), shifted.exp()
    at_targets, sums, moments = _add_over_ranks(at_targets, _sum(weights), _sum(shifted.mul_(weights)))
    del shifted, weights
    log_sums = sums.log()
    of_kept = (at_targets - log_sums, maxima + log_sums) if targets.kept is None else _normalize(logits, targets)
    return of_kept[0], log_sums - moments / sums, of_kept[1], maxima + log_sums


def _gather_local(shifted: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the values at the targets [rows]; 0 if another rank holds the target."""
    columns, is_here = targets.find(shifted.shape[-1])
    return shifted.gather(-1, columns).masked_fill(~is_here, 0.0).squeeze(-1)


def _shift(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits minus their maximum over the whole vocabulary, that maximum [rows])."""
    maxima = scaled.amax(-1)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    return scaled - maxima.unsqueeze(-1), maxima


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sums [rows] over this rank's part of the vocabulary."""
    return tree.sum_vocabulary(values, values.shape[-1] * parallel_state.get_tensor_model_parallel_world_size())


def _add_over_ranks(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return sums [rows] over tensor-parallel ranks in tree order, for several values per row."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return values
    return tree.reduce(torch.stack(values, -1), parallel_state.get_tensor_model_parallel_group(), torch.float32).unbind(-1)
