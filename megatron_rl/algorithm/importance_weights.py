"""Importance weights that correct for an engine that samples from a slightly different policy than the trainer's.

    q_t = p_trainer / p_engine of a sampled token under the same weights, before the update: exp(old_t - rollout_t)

    tis              min(q_t, C)                                  Yao et al., https://fengyao.notion.site/off-policy-rl
    sequence_tis     min(product of q_t, C) on every token        the same on the sequence's ratio
    icepop           q_t if low <= q_t <= high, else 0            IcePop (Ring-1T, arXiv 2510.18855)
    geometric_mask   1 if low <= (product of q_t)^(1/T) <= high, else 0, for the whole sequence
                                                                  https://richardli.xyz/post/rl-collapse-part3
    sequence_mask    1 if low <= product of q_t <= high, else 0, for the whole sequence             the same
    token_veto       0 if any q_t < correction_veto, else 1, for the whole sequence                 the same

Several corrections multiply: `["geometric_mask", "tis"]` drops sequences that drifted and caps the remaining tokens. No gradient flows
through the weights. Masked tokens still count in the divisor of the mean, as in the formulas.
"""

import logging
import math

import torch

from megatron_rl.batch.totals import Combine, Totals, combine_alone
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.errors import RunError
from megatron_rl.metrics import declare

_MEAN = declare("correction/mean_{}", "mean weight of mismatch correction, {} advantage", "number", "mean weight", label="{} advantage")
_MAX = declare("correction/max_{}", "largest weight of mismatch correction, {} advantage")
_TOUCHED = declare("correction/touched_{}", "share of capped or masked tokens, {} advantage", "share", "touched", label="{} advantage")

_log = logging.getLogger(__name__)
_NAN = "tokens without a ratio"


def compute_correction(log_ratio: torch.Tensor, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights [A], whether capped or masked bool [A]) of one response from log q, float32 [A]: the product of all corrections."""
    weights, touched = torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)
    for name in config.correction:
        factor, outside = _correct(name, log_ratio, config)
        weights, touched = weights * factor, touched | outside
    return weights, touched


def _correct(name: str, log_ratio: torch.Tensor, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
    low, high, cap = config.correction_low, config.correction_high, config.correction_cap
    if name == "token_veto":
        vetoed = (log_ratio < math.log(config.correction_veto)).any().expand_as(log_ratio)
        return 1.0 - vetoed.to(log_ratio.dtype), vetoed
    if name == "icepop":
        ratio = log_ratio.exp()
        outside = (ratio < low) | (ratio > high)
        return ratio.masked_fill(outside, 0.0), outside
    if name in ("geometric_mask", "sequence_mask"):
        ratio = (log_ratio.mean() if name == "geometric_mask" else log_ratio.sum()).exp().expand_as(log_ratio)
        outside = (ratio < low) | (ratio > high)
        return 1.0 - outside.to(log_ratio.dtype), outside
    ratio = (log_ratio.sum().expand_as(log_ratio) if name == "sequence_tis" else log_ratio).exp()
    return ratio.clamp(max=cap), ratio > cap


_warned = set[str]()


def _warn_of_small_weights(name: str, mean: float) -> None:
    """Warn once per process."""
    if not _warned:
        _warned.add(name)
        _log.warning("correction sequence_tis: the mean weight of %s advantages is %.2g; it falls with the length of responses", name, mean)


def assign_corrections(samples: list[TrainingSample], config: AlgorithmConfig, combine: Combine = combine_alone) -> dict[str, float]:
    """Set `importance_weights` of this replica's samples and return statistics by sign of the advantage, over all replicas.

    Needs old (trainer) and rollout (engine) log-probs and advantages. With `old_policy = "engine"`, the engine's log-probs replace the old
    ones first. Raise RunError on all replicas for a NaN ratio, which every mask would let through.
    """
    if config.old_policy == "engine":
        for sample in samples:
            sample.old_logprobs = sample.rollout_logprobs
    if not config.correction:
        return {}
    totals = Totals()
    for sample in samples:
        log_ratio = sample.old_logprobs - sample.rollout_logprobs
        totals.add(_NAN, log_ratio.isnan())
        sample.importance_weights, outside = compute_correction(log_ratio, config)
        advantages = sample.advantages
        for name, of_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
            totals.add(_MEAN.format(name), sample.importance_weights[of_sign])
            totals.add(_TOUCHED.format(name), outside[of_sign])
    totals, metrics = combine(totals), dict[str, float]()
    if broken := round(totals.mean(_NAN) * totals.count(_NAN)):
        names, reason = " and ".join(config.correction), "a log-prob of each is NaN, or both are -inf"
        raise RunError(f"correction {names}: {broken} tokens have no ratio of trainer to engine: {reason}")
    for name in ("positive", "negative"):
        if totals.count(_MEAN.format(name)):
            metrics |= {key.format(name): totals.mean(key.format(name)) for key in (_MEAN, _TOUCHED)}
            metrics[_MAX.format(name)] = totals.largest(_MEAN.format(name))
            if "sequence_tis" in config.correction and totals.mean(_MEAN.format(name)) < 0.1:
                _warn_of_small_weights(name, totals.mean(_MEAN.format(name)))
    return metrics
