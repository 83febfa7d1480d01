"""A step's samples: rank 0 makes them of the completions, settles what rewards and lengths decide, and gives each replica its own.

Old and reference log-probs and the update of a sample are computed on one replica, so log-probs never leave it. Completions stay on rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.multi_objective import normalize_then_sum
from megatron_rl.batch.packing import compute_costs, deal
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.distributed import errors_on_all_ranks, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.passes.replicas import count_replicas, scatter_samples
from megatron_rl.rollout.metrics import build_sample_rows, compute_rollout_metrics, select_evenly
from megatron_rl.rollout.worker import RolloutBatch

if TYPE_CHECKING:  # loaded where a run replays
    from megatron_rl.batch.replay import ReplayBuffer


@dataclass
class StepSamples:
    """What a rank has of one step's samples."""

    mini_batches: list[list[TrainingSample]]
    """This replica's samples of each optimizer step."""
    count: int
    """Samples of all replicas."""
    tokens: int
    """Of all of them."""
    sampled_tokens: int
    shown: list[int]
    """Numbers of those that the report shows."""
    metrics: dict[str, float]
    """Of the rollout."""
    rewards: list[float] = field(default_factory=list)
    """Rank 0: of all samples, as is `excluded`; with the KL term in the reward, advantages wait for log-probs."""
    excluded: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Rank 0: sampled tokens of each sample."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rank 0: the report's, of `shown`."""

    @property
    def own(self) -> list[TrainingSample]:
        """This replica's samples of all mini-batches."""
        return [sample for mini_batch in self.mini_batches for sample in mini_batch]


def share_samples(
    rollouts: list[RolloutBatch],
    step: int,
    config: Config,
    routing: RoutingShape | None,
    attention_length: float,
    replay: ReplayBuffer | None = None,
) -> StepSamples:
    """Return this rank's samples of the rollout that rank 0 passes, and takes out of the list; the others pass none. With `replay`, of
    which rank 0's counts, mini-batches get kept groups as well. Collective. Raise RunError if the engine's routing does not fit `routing`.

    Rank 0 sets loss weights, and advantages that wait for nothing. In every mini-batch, of whole groups, each replica has about
    the same cost (`batch.packing`). Who gets what depends on lengths and the number of replicas alone.
    """
    mini_batches, known, algorithm = list[list[TrainingSample]](), list[StepSamples](), config.algorithm

    def prepare() -> tuple[int, int, int, list[int], dict[str, float]]:
        rollout = rollouts.pop()
        completions, owners = rollout.completions_B, list_owners(rollout)
        own, group_size = to_training_samples(rollout, routing), config.rollout.group_size
        rewards, excluded = [each.score for each in completions], [each.reward.excluded for each in completions]
        lengths = [each.total_sampled for each in completions]
        if not algorithm.has_late_advantages:
            if algorithm.multi_objective_aggregation == "normalize_then_sum":
                advantages = normalize_then_sum(*_split_rewards(rollout, config), excluded, algorithm, group_size, lengths)
            else:
                advantages = compute_advantages(rewards, excluded, algorithm, group_size, lengths)
            for sample, owner in zip(own, owners, strict=True):
                sample.advantage = advantages[owner]
        updates = [owner * algorithm.updates_per_step // len(completions) for owner in owners]
        counts = [updates.count(number) for number in range(algorithm.updates_per_step)]
        if not all(counts):
            first = next(each.environment_error for each in completions if not each.conversations)
            raise RunError(f"no agent of a mini-batch has asked the policy anything, so there is nothing to train on (the first: {first})")
        mini_batches.extend(_split(own, counts))
        metrics = compute_rollout_metrics(rollout)
        if replay is not None:
            by_group = groupby(zip(owners, own, strict=True), lambda pair: pair[0] // group_size)
            metrics |= replay.extend(mini_batches, ([sample for _, sample in members] for _, members in by_group), step - 1)
        for mini_batch in mini_batches:
            assign_loss_weights(mini_batch, algorithm.aggregate, config.rollout.max_new_tokens)
        sizes = [(sample.length, sample.sampled_count) for mini_batch in mini_batches for sample in mini_batch]
        tokens, sampled = (sum(each) for each in zip(*sizes, strict=True))
        places = dict(zip(reversed(owners), reversed(range(len(owners))), strict=True))  # of each one's first sample
        chosen = select_evenly(sorted(places), config.log.samples)
        rows = build_sample_rows(step, [completions[owner] for owner in chosen], len(chosen))
        facts = len(sizes), tokens, sampled, [places[owner] for owner in chosen], metrics
        known.append(StepSamples([], *facts, rewards, excluded, lengths, rows))
        return facts

    facts = run_on_rank0(prepare)
    samples = known[0] if known else StepSamples([], *facts)
    for mini_batch in mini_batches or [[]] * algorithm.updates_per_step:
        shares = deal(compute_costs([sample.length for sample in mini_batch], attention_length), count_replicas())
        samples.mini_batches.append(scatter_samples([[mini_batch[index] for index in share] for share in shares]))
    if routing is not None:
        with errors_on_all_ranks():  # each replica looks into its own records
            for sample in samples.own:
                routing.check(sample.routed_experts.numpy(), sample.length, f"completion {sample.number + 1} of {samples.count}")
    return samples


def _split_rewards(rollout: RolloutBatch, config: Config) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return what each reward function gave all completions, by label, and its weight; a length penalty counts as one of weight 1. One
    without a verdict has 0 of each."""
    weights = {label: part.weight for label, part in config.reward.parts.items()}
    rewards = {label: [completion.reward.parts.get(label, 0.0) for completion in rollout.completions_B] for label in weights}
    if config.algorithm.overlong_share:
        weights["overlong"], rewards["overlong"] = 1.0, [completion.length_penalty for completion in rollout.completions_B]
    return rewards, weights


def _split(samples: list[TrainingSample], counts: list[int]) -> list[list[TrainingSample]]:
    return [samples[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def list_owners(rollout: RolloutBatch) -> list[int]:
    """Return, for each training sample, the number of its completion: an agent's episode has one of each conversation."""
    return [number for number, completion in enumerate(rollout.completions_B) for _ in completion.conversations]


def to_training_samples(rollout: RolloutBatch, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """Convert completions, with their rewards, the engine's log-probs and, if `routing` is given, its routing. No column is copied, but of
    answers of several turns. The conversations of an agent's episode lie side by side, and have its reward.

    Raises RunError if that routing does not have the model's shape.
    """
    pairs = [(completion, each) for completion in rollout.completions_B for each in completion.conversations]
    if routing is not None:
        for number, (_, each) in enumerate(pairs, 1):
            tokens = len(each.prompt_ids_T) + len(each.output_ids_T)
            routing.check_shape(each.routed_experts_T, tokens, f"completion {number} of {len(pairs)}")
    return [
        TrainingSample(
            torch.from_numpy(each.prompt_ids_T),
            torch.from_numpy(each.output_ids_T),
            number=number,
            reward=completion.score,
            excluded=completion.reward.excluded,
            masked=completion.masked,
            rollout_logprobs=_sampled(each.logprobs_T, each.response_mask_T),
            response_mask=_to_tensor(each.response_mask_T),
            routed_experts=_to_tensor(None if routing is None else each.routed_experts_T),
            kept_tokens=each.kept_tokens,
            version_lags=_sampled(each.version_lags_T, each.response_mask_T),
        )
        for number, (completion, each) in enumerate(pairs)
    ]


def _sampled(values_T: np.ndarray | None, response_mask_T: np.ndarray | None) -> torch.Tensor:
    """Return the values of the policy's own tokens, without the environment's; no mask for an answer of one turn."""
    return _to_tensor(values_T if values_T is None or response_mask_T is None else values_T[response_mask_T])


def _to_tensor(values: np.ndarray | None) -> torch.Tensor:
    return torch.empty(0) if values is None else torch.from_numpy(values)
