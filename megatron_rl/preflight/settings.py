"""Checks that need only the configuration, or the configuration and config.json."""

from dataclasses import fields

from megatron_rl.algorithm.old_logprobs import list_needs
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.config.rollout import MOST_KEPT
from megatron_rl.errors import UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import read_config
from megatron_rl.preflight.rule import Facts, Needs, rule
from parallel.formats import SERVED_METHODS
from parallel.model_geometry import ModelGeometry, as_critic
from parallel.mtp_layers import can_train_mtp

_CORRECT_OFF_POLICY = 'set algorithm.correction = "tis", or algorithm.old_policy = "engine"'


@rule(Needs.TRAINER)
def updates_divide_the_prompts(facts: Facts) -> None:
    updates, prompts = facts.config.algorithm.updates_per_step, facts.config.rollout.prompts_per_step
    if prompts % updates:
        raise UserError("algorithm.updates_per_step", updates, f"must divide rollout.prompts_per_step ({prompts})", "change one of them")


@rule(Needs.TRAINER)
def profiled_steps_exist(facts: Facts) -> None:
    steps, profiled = facts.config.train.steps, facts.config.log.profile_steps
    if late := [step for step in profiled if step > steps]:
        raise UserError("log.profile_steps", late[0], f"must not exceed train.steps ({steps})", "use steps of the run")


@rule(Needs.TRAINER)
def learning_rate_schedule_is_valid(facts: Facts) -> None:
    train = facts.config.train.decay_over(facts.config.optimizer_steps)
    if train.decay_style == "constant":  # these settings would be ignored silently
        for name in ("decay_steps", "wsd_decay_steps", "min_learning_rate"):
            if value := getattr(facts.config.train, name):
                rule = "describes a decay of the learning rate, but train.decay_style is constant"
                raise UserError(f"train.{name}", value, rule, "set train.decay_style to linear, cosine or WSD")
        return
    after_warmup = train.decay_steps - train.warmup_steps
    if train.min_learning_rate > train.learning_rate:
        rule = f"must not exceed train.learning_rate ({train.learning_rate})"
        raise UserError("train.min_learning_rate", train.min_learning_rate, rule, "lower it")
    if after_warmup <= 0:
        rule = f"must be less than train.decay_steps ({train.decay_steps}), at which the decay ends"
        raise UserError("train.warmup_steps", train.warmup_steps, rule, "lower it")
    if train.decay_style == "WSD" and not 0 < train.wsd_decay_steps <= after_warmup:
        rule = f"must be from 1 to {after_warmup}, the number of optimizer steps after the warm-up"
        raise UserError("train.wsd_decay_steps", train.wsd_decay_steps, rule, "a tenth of the run is common")


@rule(Needs.TRAINER)
def critic_settings_are_valid(facts: Facts) -> None:
    config, train = facts.config, facts.config.critic_train
    if not config.algorithm.has_critic:
        if config.critic != CriticConfig():  # the section would be ignored silently
            rule = f"configures a critic, but algorithm.advantage = {config.algorithm.advantage!r} does not use one"
            raise UserError("critic", None, rule, 'leave the section out, or set algorithm.advantage = "gae"')
        return
    if (warmup := config.critic.critic_warmup) >= train.steps:
        rule = f"must be less than train.steps ({train.steps}), or the policy is never trained"
        raise UserError("critic.critic_warmup", warmup, rule, "lower it")
    decay = train.wsd_decay_steps if train.decay_style == "WSD" else 1
    if train.decay_style != "constant" and train.warmup_steps + decay > train.decay_steps:
        rule = f"leaves less than {decay} of train.decay_steps ({train.decay_steps}) for the decay of the learning rate"
        raise UserError("critic.warmup_steps", train.warmup_steps, rule, "lower it")


@rule(Needs.TRAINER)
def groups_have_several_members(facts: Facts) -> None:
    algorithm, size = facts.config.algorithm, facts.config.rollout.group_size
    distills_only = facts.config.teacher is not None and not facts.config.teacher.reward_coef
    if size > 1 or ((algorithm.has_critic or distills_only) and not algorithm.dynamic_sampling_max_rounds):
        return
    user = "dynamic sampling" if algorithm.has_critic else f"algorithm.advantage = {algorithm.advantage!r}"
    fix = "raise it, or set dynamic_sampling_max_rounds = 0" if algorithm.has_critic else 'raise it, or set algorithm.advantage = "gae"'
    raise UserError("rollout.group_size", size, f"is too small, because {user} compares the completions of a group", fix)


@rule(Needs.TRAINER)
def oversampling_excludes_dynamic_sampling(facts: Facts) -> None:
    extra = facts.config.rollout.over_sampling_prompts
    if extra and facts.config.algorithm.dynamic_sampling_max_rounds:
        rule = "aborts groups before dynamic sampling (algorithm.dynamic_sampling_max_rounds) can judge them"
        raise UserError("rollout.over_sampling_prompts", extra, rule, "set one of the two to 0")


@rule(Needs.TRAINER)
def measured_pass_rates_resume_exactly(facts: Facts) -> None:
    """Later sampling rounds draw problems when groups finish, which happens at a different time in each run."""
    config = facts.config
    rounds, measured = config.algorithm.dynamic_sampling_max_rounds, any(each.pass_rate == "measured" for each in config.data.train)
    if rounds and config.placement.max_staleness and measured:
        rule = 'draws problems while pass rates change, so a resumed run with pass_rate = "measured" would draw different problems'
        raise UserError("algorithm.dynamic_sampling_max_rounds", rounds, rule, "set it or placement.max_staleness to 0")


@rule(Needs.TRAINER | Needs.MODEL)
def critic_has_the_policys_architecture(facts: Facts) -> None:
    path = facts.config.critic.path
    if path is None or not facts.config.algorithm.has_critic:
        return
    if str(path).startswith(HUB_PREFIX):
        rule = "is on the hub, but a critic can only be loaded from a local folder"
        raise UserError("critic.path", str(path), rule, "download it and give its folder")
    hf_config = read_config(path, "critic.path")
    find_checkpoint_format(hf_config)
    critic, policy = (ModelGeometry.from_hf_config(as_critic(each)) for each in (hf_config, facts.hf_config))
    different = [field.name for field in fields(policy) if getattr(critic, field.name) != getattr(policy, field.name)]
    if different:
        rule = f"must have the same architecture as model.path, but these differ: {', '.join(different)}"
        raise UserError("critic.path", str(path), rule, "give a checkpoint of the same architecture, or leave it out")


@rule(Needs.TRAINER, {"rollout.top_k": 512})
def candidate_tokens_are_bounded(facts: Facts) -> None:
    """The engine reports to the trainer which candidates each token was sampled from."""
    rollout = facts.config.rollout
    if rollout.top_k == -1 and (rollout.top_p < 1 or rollout.min_p > 0):
        name, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("min_p", rollout.min_p)
        rule = "leaves an unbounded number of candidate tokens, which the engine must all report to the trainer"
        raise UserError(f"rollout.{name}", value, rule, "set rollout.top_k, for example to 512")
    if rollout.top_k == 1 or rollout.top_k > MOST_KEPT:
        rule = f"must be from 2 to {MOST_KEPT}, or -1: one candidate leaves nothing to learn, and more cannot be reported to the trainer"
        raise UserError("rollout.top_k", rollout.top_k, rule, "use eval.top_k for evaluation")


@rule(Needs.TRAINER)
def normalization_needs_several_rewards(facts: Facts) -> None:
    parts, how = facts.config.reward.parts, facts.config.algorithm.multi_objective_aggregation
    if how == "normalize_then_sum" and len(parts) == 1:
        rule = f"normalizes reward functions separately, but there is only one ({next(iter(parts))})"
        raise UserError("algorithm.multi_objective_aggregation", how, rule, "leave it out, or set several [[reward.functions]]")


@rule(Needs.TRAINER)
def calibration_needs_a_quantized_trainer(facts: Facts) -> None:
    every, mode = facts.config.algorithm.calibrate_every, facts.config.precision.mode
    if every and not facts.contract.trainer_format.quantized:
        rule = f"calibrates ratios of a quantized trainer, but precision.mode {mode} does not quantize the trainer"
        raise UserError("algorithm.calibrate_every", every, rule, "set it to 0, or use fp8_unified")


@rule(Needs.ENGINE)
def engine_serves_the_format(facts: Facts) -> None:
    method = facts.contract.engine_format.engine_quantization
    if method is not None and method not in SERVED_METHODS:
        rule = f"needs an engine that serves {method}, but this one serves {', '.join(SERVED_METHODS)}"
        raise UserError("precision.mode", facts.contract.mode, rule, "use another mode")


@rule(Needs.ENGINE)
def format_has_the_scales(facts: Facts) -> None:
    chosen, format = facts.config.precision.scale_format, facts.contract.engine_format
    if format.quantized and chosen not in ("pow2", format.scale_format):  # it would be ignored silently
        rule = f"does not apply to {format.name.upper()}, whose scales are {format.scale_format}"
        raise UserError("precision.scale_format", chosen, rule, "leave it out")


@rule(Needs.TRAINER)
def backend_supports_high(facts: Facts) -> None:
    precision = facts.config.precision
    if facts.contract.trainer_format.quantized and precision.backend != "emulated" and precision.high != "bf16":
        rule = f"is not supported by precision.backend {precision.backend}"
        raise UserError("precision.high", precision.high, rule, "use bf16, or precision.backend emulated")


@rule(Needs.TRAINER, {"algorithm.correction": "tis"})
def off_policy_tokens_are_corrected(facts: Facts) -> None:
    config = facts.config
    if config.algorithm.correction or config.algorithm.old_policy == "engine":
        return
    rule = "trains on tokens of older policy versions without a correction"
    if config.placement.max_staleness:
        raise UserError("placement.max_staleness", config.placement.max_staleness, rule, _CORRECT_OFF_POLICY)
    if config.replay is not None:
        raise UserError("replay", None, rule, _CORRECT_OFF_POLICY)


@rule(Needs.TRAINER)
def pass_is_not_needed(facts: Facts) -> None:
    if facts.config.algorithm.old_logprobs == "engine" and (reasons := list_needs(facts.config)):
        raise UserError("algorithm.old_logprobs", "engine", f"leaves out a pass that the run needs: {reasons[0]}", "leave it out")


def _refuse_late_advantages(algorithm: AlgorithmConfig, rule: str) -> UserError:
    """Return the error about the setting because of which advantages depend on the trainer's log-probs or values."""
    name, value = ("advantage", algorithm.advantage) if algorithm.has_critic else ("kl_in", algorithm.kl_in)
    return UserError(f"algorithm.{name}", value, rule, 'use an advantage of group rewards, and kl_in = "loss"')


@rule(Needs.TRAINER)
def replay_settings_are_valid(facts: Facts) -> None:
    replay, ahead = facts.config.replay, facts.config.placement.max_staleness
    if replay is None:
        return
    if replay.max_staleness <= ahead:
        rule = f"must be greater than placement.max_staleness ({ahead}), because a replayed group is older than when it was sampled"
        raise UserError("replay.max_staleness", replay.max_staleness, rule, "raise it")
    if facts.config.algorithm.has_late_advantages:
        rule = "computes advantages from the current policy's log-probs or values, but [replay] reuses the advantages of stored groups"
        raise _refuse_late_advantages(facts.config.algorithm, rule)


@rule(Needs.TRAINER, {"sync.running": "finish"})
def replayed_routing_has_one_version(facts: Facts) -> None:
    config = facts.config
    if config.placement.max_staleness and config.sync.running == "continue" and config.algorithm.routing_replay == "engine":
        rule = 'replays one routing per token, but with sync.running = "continue" several versions route the tokens of a completion'
        fix = 'set sync.running = "finish", or routing_replay = "none"'
        raise UserError("algorithm.routing_replay", "engine", rule, fix)


@rule(Needs.TRAINER, {"log.attribute_every": 0})
def attributed_tokens_have_one_version(facts: Facts) -> None:
    config = facts.config
    if (config.placement.max_staleness or config.replay) and config.log.attribute_every:
        rule = "can only attribute the mismatch of tokens that the current policy version sampled"
        fix = "set it to 0, or leave out [replay]" if config.replay else "set it or placement.max_staleness to 0"
        raise UserError("log.attribute_every", config.log.attribute_every, rule, fix)


@rule(Needs(0))
def agent_settings_are_valid(facts: Facts) -> None:
    config = facts.config
    if config.agent is None:
        return
    if config.environment is not None:
        raise UserError("agent", None, "excludes [environment], because both reply to the policy", "leave one of them out")
    if config.data.chat:
        rule = "applies a chat template to the question, but the agent's endpoint already applies it to the agent's messages"
        raise UserError("data.chat", True, rule, "set it to false")
    if config.agent.own_reward and (config.reward.function or config.reward.functions):
        rule = "makes the agent return the reward, but [reward] sets a reward function"
        raise UserError("agent.own_reward", True, rule, "leave one of them out")


@rule(Needs(0))
def chat_template_settings_apply(facts: Facts) -> None:
    data = facts.config.data
    if data.chat_template_kwargs and not data.chat and facts.config.agent is None:
        rule = "only applies to a chat template, and neither data.chat nor [agent] uses one"
        raise UserError("data.chat_template_kwargs", ", ".join(data.chat_template_kwargs), rule, "set data.chat = true, or remove it")


@rule(Needs.TRAINER)
def agent_advantages_depend_on_rewards(facts: Facts) -> None:
    if facts.config.agent is not None and facts.config.algorithm.has_late_advantages:
        rule = "computes advantages per sample, but an agent's episode may have several samples"
        raise _refuse_late_advantages(facts.config.algorithm, rule)


@rule(Needs.TRAINER)
def hang_timeout_exceeds_other_timeouts(facts: Facts) -> None:
    config = facts.config
    timeouts = {"rollout.request_timeout": config.rollout.request_timeout, "sync.timeout": config.sync.timeout}
    if config.agent is not None:
        timeouts["agent.timeout"] = config.agent.timeout
    name = max(timeouts, key=lambda field: timeouts[field])
    if 0 < config.log.stuck_after <= timeouts[name]:
        rule = f"must be greater than {name} ({timeouts[name]:g})"
        raise UserError("log.stuck_after", config.log.stuck_after, rule, f"raise it, lower {name}, or set it to 0")


@rule(Needs.TRAINER | Needs.MODEL)
def mtp_layers_can_be_trained(facts: Facts) -> None:
    factor = facts.config.train.mtp_loss_scaling_factor
    if factor and not facts.model.mtp_layers:
        rule = f"trains multi-token prediction layers, but this {facts.model.family} model has none (num_nextn_predict_layers)"
        raise UserError("train.mtp_loss_scaling_factor", factor, rule, "leave it out")
    if factor and not can_train_mtp(facts.model):
        rule = f"trains multi-token prediction layers, which is not supported for {facts.model.family}"
        raise UserError("train.mtp_loss_scaling_factor", factor, rule, "leave it out to keep the layers unchanged")
    if factor and facts.model.tied:
        rule = "trains multi-token prediction layers, which is not supported if the output layer is tied to the embedding"
        raise UserError("train.mtp_loss_scaling_factor", factor, rule, "leave it out to keep the layers unchanged")


@rule(Needs.TRAINER)
def lora_fits_the_run(facts: Facts) -> None:
    config = facts.config
    if config.lora is None:
        return
    if config.algorithm.has_critic:
        raise UserError("lora", None, "is not supported in a run with a critic", "leave it out, or use another algorithm.advantage")
    if config.log.attribute_every:
        rule = "needs FP32 master weights, which the weights frozen by [lora] do not have"
        raise UserError("log.attribute_every", config.log.attribute_every, rule, "set it to 0")
    if config.sync.delta == "on":
        raise UserError("sync.delta", "on", "has no effect with [lora], which only sends adapters", "leave it out")
    if rate := config.train.router_bias_rate:
        raise UserError("train.router_bias_rate", rate, "changes the routers' biases, which [lora] freezes", "set it to 0")


@rule(Needs.TRAINER | Needs.MODEL)
def lora_fits_the_model(facts: Facts) -> None:
    lora = facts.config.lora
    if lora is None:
        return
    on_gpu = facts.contract.trainer_format.quantized and facts.config.precision.backend != "emulated"
    if facts.model.experts is not None and on_gpu and {"linear_fc1", "linear_fc2"} & set(lora.targets):
        rule = "adapts layers of experts, which an engine on a GPU computes in a single kernel without support for adapters"
        raise UserError("lora.targets", list(lora.targets), rule, "only adapt attention: linear_qkv, linear_proj")
    if facts.model.experts is not None and facts.model.experts.swiglu_limit and {"linear_fc1", "linear_fc2"} & set(lora.targets):
        rule = f"adapts layers of experts, which is not supported for {facts.model.family}"
        raise UserError("lora.targets", list(lora.targets), rule, "only adapt attention: linear_qkv, linear_proj")
    adapted = {name for kind in facts.model.attention for name in kind.adapted} | {"linear_fc1", "linear_fc2"}
    if absent := [each for each in lora.targets if each not in adapted]:
        rule, rest = f"adapts {absent[0]}, which the model's attention does not have", [each for each in lora.targets if each not in absent]
        raise UserError("lora.targets", list(lora.targets), rule, f"set it to {rest}" if rest else "leave [lora] out, or use another model")
