"""What may change when a run is resumed: every field of the configuration, with the reason. docs/reference/resume.md has the same rows."""

from enum import StrEnum
from typing import NamedTuple


class MayChange(StrEnum):
    """Condition under which a field may change."""

    FREELY = "freely"
    EQUAL = "if equal"  # the content that it names is compared, and may only differ if the field is named
    NAMED = "if named"  # in checkpoint.allow_changes
    NEVER = "never"


class Row(NamedTuple):
    section: str
    fields: str  # separated by blanks
    may_change: MayChange
    reason: str  # what a change moves


FREELY, EQUAL, NAMED, NEVER = MayChange
_ORDER = (
    "Sums are added in another order, so results differ in rounding. `train.router_aux_loss` is a loss of each micro-batch, so it differs."
)
_BATCHING = "On a CPU, no bit depends on it. On a GPU, other batches round differently, so other tokens are sampled."
_EVALUATION = "Metrics of evaluations before and after the change cannot be compared."
_HELD_OUT = f"Held-out problems are left out of `data.train`, whose problems are compared. {_EVALUATION}"
_LIMITS = "Changes no result, except that of a completion which exceeds the limit."
_FILES = "The hashes of its files are compared."
_PROBLEMS = "All rows, the prompt template, and the order are compared. Other problems, if named, are drawn from the same position on."
_COLUMNS = "question messages answer tools level pass_rate"

TABLE = (
    Row("model", "path", EQUAL, f"Reference, LoRA base, and imported FP8 blocks are read from it. {_FILES}"),
    Row("precision", "mode high kv masters", NEVER, "The tensors in the checkpoint and the reference depend on it."),
    Row("precision", "scale_format backend reduction", NAMED, "Trainer and engine round differently."),
    Row("train.layout", "tp sequence_parallel pp vpp first_stage_layers last_stage_layers cp ep etp dp", FREELY, _ORDER),
    Row("train", "micro_batch_tokens", FREELY, _ORDER),
    Row("train", "two_batch_overlap", FREELY, "Changes no result, except in rounding with `vpp`, which packs micro-batches otherwise."),
    Row("train", "overlap_grad_reduce", FREELY, "Changes no result, except in rounding with several replicas, which divide other buckets."),
    Row("train", "recompute overlap_param_gather", FREELY, "Changes no result."),
    Row("train", "steps", FREELY, "Ends the run. A decay of the learning rate does not move with it unless `train.decay_steps` is named."),
    Row("train", "decay_steps", NAMED,
        "Ends the decay of the learning rate. If it is 0, the number of steps that it stands for is compared."),
    Row("train", "learning_rate warmup_steps decay_style wsd_decay_steps min_learning_rate", NAMED,
        "The new schedule of the learning rate applies as if the run had had it from the start. Adam's moments are kept."),
    Row("train", "adam_beta1 adam_beta2 adam_eps weight_decay clip_grad", NAMED, "Changes optimizer steps. Adam's moments are kept."),
    Row("train", "router_aux_loss router_bias_rate", NAMED, "Balances experts differently."),
    Row("train", "mtp_loss_scaling_factor", NAMED,
        "Changes the loss of the MTP layers. It cannot become 0 or stop being 0, because a checkpoint has trained MTP layers or not."),
    Row("train", "seed", NEVER, "Sampling and the master weights of the reference are drawn from it."),
    Row("rollout", "engine", NAMED, "Another engine samples."),
    Row("rollout", "engines nodes_per_engine hosts max_running_requests max_total_tokens enable_prefix_caching chunked_prefill_size sglang",
        FREELY, _BATCHING),
    Row("rollout", "tp ep", FREELY, f"{_BATCHING} So do sums with `precision.reduction = \"fast\"`."
        " With `\"ranks\"`, another max(`train.layout.tp`, `rollout.tp`) continues with other last bits, also on a CPU."),
    Row("rollout", "start_timeout request_timeout health_timeout max_restarts", FREELY, "Only decides when an engine counts as lost."),
    Row("rollout", "max_new_tokens", NAMED,
        "Limits responses, also in evaluations. `algorithm.overlong_share` and `aggregate = \"constant\"` are relative to it."),
    Row("rollout", "prompts_per_step over_sampling_prompts group_size", NAMED,
        "Changes the size of a batch. Problems are drawn from the same position on."),
    Row("rollout", "temperature top_p top_k min_p stop", NAMED, f"Changes the distribution that is sampled and trained. {_EVALUATION}"),
    Row("algorithm", "name", FREELY, "A preset only sets defaults of other fields, which are compared themselves."),
    Row("algorithm", "updates_per_step", NAMED, "Changes the number of optimizer steps, which the learning rate's schedule counts."),
    Row("algorithm", "advantage gamma lam advantage_std multi_objective_aggregation", NAMED,
        "Changes advantages. `gae` cannot be set or left, because a checkpoint has a critic or not."),
    Row("algorithm", "loss loss_settings clip_low clip_high dual_clip calibrate_every cov_ratio clip_cov_low clip_cov_high kl_cov_coef "
        "entropy_coef aggregate kl_coef kl_estimator kl_bias_correction kl_in off_policy_mask_threshold mask_truncated_completions "
        "old_policy correction correction_cap correction_low correction_high correction_veto routing_replay", NAMED,
        "Changes the loss. The reference is kept. Calibrated bounds continue from their values."),
    Row("algorithm", "old_logprobs", FREELY, "Changes no result if the mismatch is 0. Otherwise, ratios are against the engine's policy."),
    Row("algorithm", "dynamic_sampling_max_rounds accuracy_low accuracy_high", NAMED, "Changes which groups are trained on."),
    Row("algorithm", "overlong_share overlong_penalty", NAMED, "Changes rewards."),
    Row("replay", "prompts_per_step max_staleness max_replays buffer_size", NAMED, "Changes which groups are replayed. The buffer stays."),
    Row("critic", "path", EQUAL, f"Imported FP8 blocks are read from it. {_FILES}"),
    Row("critic", "learning_rate warmup_steps critic_warmup cliprange_value", NAMED, "Changes the critic's steps. Its moments are kept."),
    Row("teacher", "path", EQUAL, f"Scores tokens. {_FILES}"),
    Row("teacher", "kl_coef kl_in kl_estimator reward_coef", NAMED, "Changes advantages or the loss."),
    Row("lora", "rank alpha targets", NEVER, "The adapters in the checkpoint have this shape and scale."),
    Row("data.train", "source format settings keep_columns name weight curriculum pass_rate pass_rate_low pass_rate_high recheck_every",
        EQUAL, f"{_PROBLEMS} Pass rates are then measured anew. A set whose file has moved keeps its name."),
    Row("data.train.columns", _COLUMNS, EQUAL, _PROBLEMS),
    Row("data.eval", "source format settings keep_columns name", EQUAL, _HELD_OUT),
    Row("data.eval.columns", _COLUMNS, EQUAL, _HELD_OUT),
    Row("data", "format settings keep_columns overlap prompt_template prompt_template_file chat system_prompt max_prompt_tokens seed",
        EQUAL, _PROBLEMS),
    Row("data", "chat_template_kwargs date special_text", NAMED, "Changes prompts, also those of agents."),
    Row("data.columns", _COLUMNS, EQUAL, _PROBLEMS),
    Row("data", "eval_size", EQUAL, _HELD_OUT),
    Row("data", "eval_every", FREELY, "Decides which steps are evaluated."),
    Row("data", "max_left_out", FREELY, "Only decides whether a start is refused."),
    Row("eval", "samples temperature top_p top_k min_p", FREELY, _EVALUATION),
    Row("reward", "function thinking on_error", NAMED, "Changes rewards."),
    Row("reward.functions", "name weight settings pattern full_tokens zero_tokens", NAMED, "Changes rewards."),
    Row("reward.functions", "url token_env batch_size timeout retries", FREELY, "Says where a reward server is and how it is asked."),
    Row("reward", "workers timeout memory_mb max_error_share", FREELY, _LIMITS),
    Row("environment", "name max_turns max_tokens", NAMED, "Changes what the environment does."),
    Row("environment", "workers timeout memory_mb", FREELY, _LIMITS),
    Row("agent", "name command tool_parser reasoning_parser max_calls max_tokens own_reward", NAMED, "Changes what the agent does."),
    Row("agent", "workers timeout memory_mb", FREELY, _LIMITS),
    Row("placement", "kind", FREELY, "Only decides who holds memory when."),
    Row("placement", "max_staleness", NAMED, "Changes the age of the tokens that are trained on."),
    Row("sync", "transport bucket_mb staged proof delta host dir timeout", FREELY, "The same bytes are sent and proved."),
    Row("sync", "running", NAMED, "Changes which policy versions sample a completion."),
    Row("sync", "canary canary_bound max_mismatch on_mismatch", FREELY, "Only decides when the run stops."),
    Row("checkpoint", "every keep resume allow_changes", FREELY, "Changes no result."),
    Row("log", "dir trackers samples attribute_every profile_steps profile_ranks stuck_after", FREELY, "Changes no result."),
)  # fmt: skip

FIELDS = {f"{row.section}.{name}": row for row in TABLE for name in row.fields.split()}
"""The row of each field. Indices into lists are left out: `data.train.source`."""


def find_row(field: str) -> Row | None:
    """Return the row of a field, given with or without indices into lists and keys of a table such as `rollout.sglang`. None if it is
    unknown."""
    parts = [part for part in field.split(".") if not part.isdigit()]
    return next((row for end in range(len(parts), 0, -1) if (row := FIELDS.get(".".join(parts[:end])))), None)


def is_named(field: str, allowed: tuple[str, ...]) -> bool:
    """Return whether `allowed` has the field, or the table that it is in."""
    path = ".".join(part for part in field.split(".") if not part.isdigit())
    return any(path == name or path.startswith(f"{name}.") for name in allowed)
