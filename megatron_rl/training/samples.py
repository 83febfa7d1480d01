"""The training samples of a step. Rank 0 makes them from the completions, and each replica receives its share.

Old and reference log-probs and the update of a sample are computed on one replica, so log-probs never leave it. Completions stay on rank 0.
If engines keep the columns of completions (`megatron_rl.rollout.columns`), a sample is sent without them, and its replica fetches them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.length_penalty import center_lone_penalties
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.multi_objective import normalize_then_sum
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, errors_on_all_ranks, is_rank0, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.passes.replicas import share_out
from megatron_rl.rollout.engine import find_engine_launcher
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.metrics import build_sample_rows, compute_rollout_metrics, select_evenly
from megatron_rl.types import Completion, Generation, RemoteColumns

if TYPE_CHECKING:  # loaded only by runs that replay groups
    from megatron_rl.batch.replay import ReplayBuffer

MiniBatches = list[list[TrainingSample]]
_NO_IDS, _NO_VALUES = torch.empty(0, dtype=torch.int32), torch.empty(0)


@dataclass
class StepSamples:
    """One rank's view of the samples of a step."""

    mini_batches: MiniBatches  # this replica's samples, one list per optimizer step
    count: int  # number of samples of all replicas
    tokens: int  # tokens of all samples
    sampled_tokens: int  # tokens of all samples that the policy sampled
    shown: list[int]  # numbers of the samples that the report shows
    metrics: dict[str, float]  # metrics of the rollout
    rewards: list[float] = field(default_factory=list)
    """Rewards of all completions. This and the following fields are empty on ranks other than 0."""
    excluded: list[bool] = field(default_factory=list)  # whether each completion is excluded from the loss
    lengths: list[int] = field(default_factory=list)  # sampled tokens of each completion
    rows: list[dict[str, Any]] = field(default_factory=list)  # rows of the report for the `shown` samples

    @property
    def facts(self) -> tuple[int, int, int, list[int], dict[str, float]]:
        """What every rank knows."""
        return self.count, self.tokens, self.sampled_tokens, self.shown, self.metrics

    @property
    def own(self) -> list[TrainingSample]:
        return [sample for mini_batch in self.mini_batches for sample in mini_batch]


def share_samples(
    rollout: Rank0[RolloutBatch],
    step: int,
    config: Config,
    routing: RoutingShape | None,
    attention_length: float,
    replay: ReplayBuffer | None = None,
) -> StepSamples:
    """Make the samples of a step on rank 0 and give every replica its share. Collective.

    Rank 0 sets loss weights, and the advantages that need no log-probs. Within every mini-batch, which consists of whole groups, all
    replicas have about the same cost (`batch.packing`). The assignment depends on lengths and the number of replicas only.

    Args:
        rollout: the completions, which rank 0 releases.
        routing: shape of the engine's routing records, or None if they are not replayed.
        attention_length: see `ModelGeometry.attention_length`.
        replay: buffer of groups to train on again, whose state on rank 0 counts.

    Raises:
        RunError: the engine's routing does not fit `routing`, or a mini-batch has no sample.
    """
    prepared = Rank0(lambda: prepare_samples(rollout.take(), step, config, routing, replay))
    whole = prepared.value if is_rank0() else None
    facts = run_on_rank0(lambda: prepared.value.facts, tuple[int, int, int, list[int], dict[str, float]])
    samples = StepSamples([], *facts) if whole is None else replace(whole, mini_batches=[])
    for mini_batch in [[]] * config.algorithm.updates_per_step if whole is None else whole.mini_batches:
        samples.mini_batches.append(share_out(mini_batch, attention_length, partial(fetch_columns, config=config, routing=routing)))
    if routing is not None:
        with errors_on_all_ranks():  # each replica checks its own records
            for sample in samples.own:
                routing.check(sample.routed_experts.numpy(), sample.length, f"completion {sample.number + 1} of {samples.count}")
    return samples


def prepare_samples(
    rollout: RolloutBatch, step: int, config: Config, routing: RoutingShape | None, replay: ReplayBuffer | None
) -> StepSamples:
    """Return the samples of all replicas. Rank 0."""
    algorithm, group_size, completions, owners = config.algorithm, config.rollout.group_size, rollout.completions_B, list_owners(rollout)
    own = to_training_samples(rollout, routing)
    rewards, excluded = [each.score for each in completions], [each.reward.excluded for each in completions]
    lengths = [each.total_sampled for each in completions]
    if not algorithm.has_late_advantages:
        if algorithm.multi_objective_aggregation == "normalize_then_sum":
            advantages = normalize_then_sum(*_split_rewards(rollout, config), excluded, algorithm, group_size, lengths)
        else:
            advantages = compute_advantages(rewards, excluded, algorithm, group_size, lengths)
        advantages = center_lone_penalties(advantages, completions, group_size)
        for sample, owner in zip(own, owners, strict=True):
            sample.advantage = advantages[owner]
    mini_batches = _split(rollout, own, owners, algorithm.updates_per_step)
    metrics = compute_rollout_metrics(rollout)
    if replay is not None:
        by_group = groupby(zip(owners, own, strict=True), lambda pair: pair[0] // group_size)
        metrics |= replay.extend(mini_batches, ([sample for _, sample in members] for _, members in by_group), step - 1)
    for mini_batch in mini_batches:
        assign_loss_weights(mini_batch, algorithm.aggregate, config.rollout.max_new_tokens)
    sizes = [(sample.length, sample.sampled_count) for mini_batch in mini_batches for sample in mini_batch]
    tokens, sampled = (sum(each) for each in zip(*sizes, strict=True))
    first_samples = dict(zip(reversed(owners), reversed(range(len(owners))), strict=True))  # completion -> its first sample
    chosen = select_evenly(sorted(first_samples), config.log.samples)
    rows = build_sample_rows(step, [completions[owner] for owner in chosen], len(chosen))
    shown = [first_samples[owner] for owner in chosen]
    return StepSamples(mini_batches, len(sizes), tokens, sampled, shown, metrics, rewards, excluded, lengths, rows)


def fetch_columns(samples: list[TrainingSample], config: Config, routing: RoutingShape | None) -> list[TrainingSample]:
    """Return samples with the columns that engines keep. Raise EngineLostError if an engine is lost."""
    columns_B = [each.remote for each in samples if each.remote]
    fetched = iter(find_engine_launcher(config.rollout.engine).fetch_columns(config, columns_B, routing))
    return [sample if sample.remote is None else _fill(sample, sample.remote, next(fetched)) for sample in samples]


def _fill(sample: TrainingSample, remote: RemoteColumns, generation: Generation) -> TrainingSample:
    lags_T = None
    if remote.trained_at is not None:
        versions_T = generation.versions_T
        lags_T = remote.trained_at - (np.full(remote.tokens, generation.policy_version) if versions_T is None else versions_T)
    return replace(
        sample,
        prompt_ids=_to_tensor(generation.prompt_ids_T),
        response_ids=torch.from_numpy(generation.output_ids_T),
        rollout_logprobs=torch.from_numpy(generation.logprobs_T),
        routed_experts=_to_tensor(generation.routed_experts_T),
        kept_tokens=generation.kept_tokens,
        version_lags=_to_tensor(None if lags_T is None else lags_T.astype(np.uint8)),
        remote=None,
    )


def _split_rewards(rollout: RolloutBatch, config: Config) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the rewards of all completions and the weight of each reward function, by label. A length penalty counts as one, from -1 to 0,
    whose weight is `overlong_penalty`. A completion without a verdict has a reward of 0 from each function."""
    weights = {label: part.weight for label, part in config.reward.parts.items()}
    rewards = {label: [completion.reward.parts.get(label, 0.0) for completion in rollout.completions_B] for label in weights}
    if config.algorithm.overlong_share:
        weights["overlong"] = config.algorithm.overlong_penalty
        rewards["overlong"] = [completion.length_penalty / weights["overlong"] for completion in rollout.completions_B]
    return rewards, weights


def _split(rollout: RolloutBatch, samples: list[TrainingSample], owners: list[int], updates: int) -> MiniBatches:
    """Split samples into one mini-batch per update, each of whole groups. Raise RunError if one would be empty."""
    completions = rollout.completions_B
    update_of = [owner * updates // len(completions) for owner in owners]
    counts = [update_of.count(number) for number in range(updates)]
    if not all(counts):
        first = next(each.environment_error for each in completions if not each.conversations)
        raise RunError(f"no agent of a mini-batch has sent a request to the policy, so there is nothing to train on (first error: {first})")
    return [samples[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


def list_owners(rollout: RolloutBatch) -> list[int]:
    """Return the index of the completion that each training sample belongs to. An agent's episode has one sample per conversation."""
    return [number for number, completion in enumerate(rollout.completions_B) for _ in completion.conversations]


def to_training_samples(rollout: RolloutBatch, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """Convert completions to training samples with rewards, the engine's log-probs, and, if `routing` is given, its routing records.

    No column is copied, except for responses of several turns. The conversations of an agent's episode are neighbors and share its reward.
    Raises RunError if the routing records do not have the model's shape.
    """
    pairs = [(completion, each) for completion in rollout.completions_B for each in completion.conversations]
    if routing is not None:
        for number, (_, each) in enumerate(pairs, 1):
            tokens = len(each.prompt_ids_T) + len(each.output_ids_T)
            if each.remote is None:
                routing.check_shape(each.routed_experts_T, tokens, f"completion {number} of {len(pairs)}")
    return [_to_sample(number, completion, each, routing) for number, (completion, each) in enumerate(pairs)]


def _to_sample(number: int, completion: Completion, each: Completion, routing: RoutingShape | None) -> TrainingSample:
    """Return the sample of `each`, one of the completion's conversations."""
    facts: dict[str, Any] = {
        "number": number,
        "reward": completion.score,
        "excluded": completion.reward.excluded,
        "masked": completion.masked,
        "seeds": torch.tensor(each.seeds, dtype=torch.int64),
    }
    if each.remote is not None:
        return TrainingSample(_NO_IDS, _NO_IDS, remote=each.remote, **facts)
    return TrainingSample(
        torch.from_numpy(each.prompt_ids_T),
        torch.from_numpy(each.output_ids_T),
        rollout_logprobs=_sampled(each.logprobs_T, each.response_mask_T),
        response_mask=_to_tensor(each.response_mask_T),
        routed_experts=_to_tensor(None if routing is None else each.routed_experts_T),
        kept_tokens=each.kept_tokens,
        version_lags=_sampled(each.version_lags_T, each.response_mask_T),
        **facts,
    )


def _sampled(values_T: np.ndarray | None, response_mask_T: np.ndarray | None) -> torch.Tensor:
    """Return the values of the tokens that the policy sampled. A response of one turn has no mask."""
    return _to_tensor(values_T if values_T is None or response_mask_T is None else values_T[response_mask_T])


def _to_tensor(values: np.ndarray | None) -> torch.Tensor:
    return _NO_VALUES if values is None else torch.from_numpy(values)
