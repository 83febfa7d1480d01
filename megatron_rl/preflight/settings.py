"""Rules that need the configuration alone. (Those on the fields of one section are pydantic's.)"""

from __future__ import annotations

from dataclasses import fields

from megatron_rl.config.critic import CriticConfig
from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.config.rollout import MOST_KEPT
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.preflight.rule import Facts, Needs, rule
from parallel.formats import SERVED_METHODS
from parallel.model_geometry import ModelGeometry, as_critic


@rule(Needs.TRAINER)
def updates_share_the_prompts(facts: Facts) -> None:
    updates, prompts = facts.config.algorithm.updates_per_step, facts.config.rollout.prompts_per_step
    if prompts % updates:
        raise UserError("algorithm.updates_per_step", updates, f"must divide rollout.prompts_per_step ({prompts})", "change one of them")


@rule(Needs.TRAINER)
def profiled_steps_are_run(facts: Facts) -> None:
    steps, profiled = facts.config.train.steps, facts.config.log.profile_steps
    if late := [step for step in profiled if step > steps]:
        raise UserError("log.profile_steps", late[0], f"must not be above train.steps ({steps})", "name a step that is run")


@rule(Needs.TRAINER)
def constant_learning_rate_does_not_fall(facts: Facts) -> None:
    """The setting would be ignored silently."""
    train = facts.config.train
    for name in ("decay_steps", "wsd_decay_steps", "min_learning_rate"):
        if train.decay_style == "constant" and (value := getattr(train, name)):
            rule = "says how the learning rate falls, which train.decay_style keeps constant"
            raise UserError(f"train.{name}", value, rule, "set train.decay_style to linear, cosine or WSD")


@rule(Needs.TRAINER)
def learning_rate_can_fall(facts: Facts) -> None:
    train = facts.config.train.decay_over(facts.config.optimizer_steps)
    if train.decay_style == "constant":
        return
    after_warmup = train.decay_steps - train.warmup_steps
    if train.min_learning_rate > train.learning_rate:
        rule = f"must not be above train.learning_rate ({train.learning_rate})"
        raise UserError("train.min_learning_rate", train.min_learning_rate, rule, "lower it")
    if after_warmup <= 0:
        rule = f"must be below train.decay_steps ({train.decay_steps}), in which the learning rate has fallen"
        raise UserError("train.warmup_steps", train.warmup_steps, rule, "lower it")
    if train.decay_style == "WSD" and not 0 < train.wsd_decay_steps <= after_warmup:
        rule = f"must be from 1 to {after_warmup}, the optimizer steps after the warm-up"
        raise UserError("train.wsd_decay_steps", train.wsd_decay_steps, rule, "a tenth of the run is common")


@rule(Needs.TRAINER)
def critic_has_advantages_to_make(facts: Facts) -> None:
    """The section would be ignored silently."""
    config = facts.config
    if not config.algorithm.has_critic and config.critic != CriticConfig():
        rule = f"sets up a critic, which algorithm.advantage = {config.algorithm.advantage!r} has none of"
        raise UserError("critic", None, rule, 'leave the section out, or set algorithm.advantage = "gae"')


@rule(Needs.TRAINER)
def critic_leaves_steps_to_the_policy(facts: Facts) -> None:
    warmup, steps = facts.config.critic.critic_warmup, facts.config.train.steps
    if facts.config.algorithm.has_critic and warmup >= steps:
        raise UserError("critic.critic_warmup", warmup, f"must be below train.steps ({steps}), or no policy is trained", "lower it")


@rule(Needs.TRAINER)
def critics_learning_rate_can_fall(facts: Facts) -> None:
    train = facts.config.critic_train
    fall = train.wsd_decay_steps if train.decay_style == "WSD" else 1
    if facts.config.algorithm.has_critic and train.decay_style != "constant" and train.warmup_steps + fall > train.decay_steps:
        rule = f"leaves fewer than {fall} of train.decay_steps ({train.decay_steps}), in which the learning rate falls"
        raise UserError("critic.warmup_steps", train.warmup_steps, rule, "lower it")


@rule(Needs.TRAINER)
def groups_can_be_compared(facts: Facts) -> None:
    algorithm, size = facts.config.algorithm, facts.config.rollout.group_size
    alone = facts.config.teacher is not None and not facts.config.teacher.reward_coef  # rewards train nothing
    if size > 1 or ((algorithm.has_critic or alone) and not algorithm.dynamic_sampling_max_rounds):
        return
    compares = "dynamic sampling" if algorithm.has_critic else f"algorithm.advantage = {algorithm.advantage!r}"
    fix = "raise it, or leave dynamic_sampling_max_rounds at 0" if algorithm.has_critic else 'raise it, or set advantage = "gae"'
    raise UserError("rollout.group_size", size, f"leaves an answer none to be compared with, as {compares} does", fix)


@rule(Needs.TRAINER)
def one_way_of_sampling_more_is_chosen(facts: Facts) -> None:
    extra = facts.config.rollout.over_sampling_prompts
    if extra and facts.config.algorithm.dynamic_sampling_max_rounds:
        rule = "aborts groups before dynamic sampling (algorithm.dynamic_sampling_max_rounds) knows which ones teach something"
        raise UserError("rollout.over_sampling_prompts", extra, rule, "set one of the two to 0")


@rule(Needs.TRAINER)
def measured_pass_rates_come_before_draws(facts: Facts) -> None:
    """Further rounds draw when groups have ended, which is at another time in each run."""
    config = facts.config
    rounds, measured = config.algorithm.dynamic_sampling_max_rounds, any(each.pass_rate == "measured" for each in config.data.train)
    if rounds and config.placement.max_staleness and measured:
        rule = "draws problems while other steps are measured, so data.train with pass_rate = measured would not resume exactly"
        raise UserError("algorithm.dynamic_sampling_max_rounds", rounds, rule, "set it, or placement.max_staleness, to 0")


@rule(Needs.TRAINER | Needs.MODEL)
def critic_is_of_the_policys_architecture(facts: Facts) -> None:
    path = facts.config.critic.path
    if path is None or not facts.config.algorithm.has_critic:
        return
    if str(path).startswith(HUB_PREFIX):
        raise UserError("critic.path", str(path), "is on the hub, and only a folder is built for a critic", "download it, give its folder")
    critic, policy = (ModelGeometry.from_hf_config(as_critic(each)) for each in (read_config(path, "critic.path"), facts.hf_config))
    different = [field.name for field in fields(policy) if getattr(critic, field.name) != getattr(policy, field.name)]
    if different:
        rule = f"is a model of another architecture than model.path ({', '.join(different)}), which is not built"
        raise UserError("critic.path", str(path), rule, "give a checkpoint of the same one, or leave it out")


@rule(Needs.TRAINER, {"rollout.top_k": 512})
def kept_tokens_are_bounded(facts: Facts) -> None:
    """The engine tells the trainer which tokens each token was drawn from."""
    rollout = facts.config.rollout
    if rollout.top_k == -1 and (rollout.top_p < 1 or rollout.min_p > 0):
        name, value = ("top_p", rollout.top_p) if rollout.top_p < 1 else ("min_p", rollout.min_p)
        rule = "leaves an unbounded number of tokens to draw from, and the trainer is told them all"
        raise UserError(f"rollout.{name}", value, rule, "set rollout.top_k, to 512 for example")
    if rollout.top_k == 1 or rollout.top_k > MOST_KEPT:
        rule = f"must be from 2, or nothing is left to learn, to {MOST_KEPT}, which the trainer is told, or -1"
        raise UserError("rollout.top_k", rollout.top_k, rule, "eval.top_k is for evaluation")


@rule(Needs.TRAINER)
def several_rewards_are_normalized(facts: Facts) -> None:
    parts, how = facts.config.reward.parts, facts.config.algorithm.multi_objective_aggregation
    if how == "normalize_then_sum" and len(parts) == 1:
        rule = f"normalizes reward functions apart, of which there is only one ({next(iter(parts))})"
        raise UserError("algorithm.multi_objective_aggregation", how, rule, "leave it out, or name several in [[reward.functions]]")


@rule(Needs.TRAINER)
def calibration_has_quantized_ratios(facts: Facts) -> None:
    every, mode = facts.config.algorithm.calibrate_every, facts.config.precision.mode
    if every and not facts.contract.trainer_format.quantized:
        rule = f"calibrates ratios of quantized weights, which precision.mode {mode} has none of in the trainer"
        raise UserError("algorithm.calibrate_every", every, rule, "set it to 0, or use fp8_unified")


@rule(Needs.ENGINE)
def engine_knows_the_format(facts: Facts) -> None:
    method = facts.contract.engine_format.engine_quantization
    if method is not None and method not in SERVED_METHODS:
        rule = f"needs an engine that serves {method}, this one serves {', '.join(SERVED_METHODS)}"
        raise UserError("precision.mode", facts.contract.mode, rule, "use another mode")


@rule(Needs.ENGINE)
def scales_are_those_of_the_format(facts: Facts) -> None:
    """The setting would be ignored silently."""
    chosen, format = facts.config.precision.scale_format, facts.contract.engine_format
    if format.quantized and chosen not in ("pow2", format.scale_format):
        rule = f"is not what {format.name.upper()} has, whose scales are {format.scale_format}"
        raise UserError("precision.scale_format", chosen, rule, "leave it out")


@rule(Needs.TRAINER)
def backend_computes_in_high(facts: Facts) -> None:
    precision = facts.config.precision
    if facts.contract.trainer_format.quantized and precision.backend != "emulated" and precision.high != "bf16":
        rule = f"is not what backend {precision.backend} computes"
        raise UserError("precision.high", precision.high, rule, "use bf16, or precision.backend emulated")


@rule(Needs.TRAINER, {"algorithm.correction": "tis"})
def stale_tokens_are_corrected(facts: Facts) -> None:
    staleness, algorithm = facts.config.placement.max_staleness, facts.config.algorithm
    if staleness and not algorithm.correction and algorithm.old_policy == "trainer":
        rule = "trains on tokens of older versions, and nothing corrects for that"
        fix = 'set algorithm.correction = "tis", or old_policy = "engine"'
        raise UserError("placement.max_staleness", staleness, rule, fix)


@rule(Needs.TRAINER, {"algorithm.correction": "tis"})
def replayed_groups_are_corrected(facts: Facts) -> None:
    algorithm = facts.config.algorithm
    if facts.config.replay is not None and not algorithm.correction and algorithm.old_policy == "trainer":
        fix = 'set algorithm.correction = "tis", or old_policy = "engine"'
        raise UserError("replay", None, "trains on tokens of older versions, and nothing corrects for that", fix)


@rule(Needs.TRAINER)
def replayed_groups_are_older_than_sampled_ones(facts: Facts) -> None:
    replay, ahead = facts.config.replay, facts.config.placement.max_staleness
    if replay is not None and replay.max_staleness <= ahead:
        rule = f"must be above placement.max_staleness ({ahead}): when a group comes back it is older than when it was sampled"
        raise UserError("replay.max_staleness", replay.max_staleness, rule, "raise it")


@rule(Needs.TRAINER)
def replayed_groups_keep_their_advantages(facts: Facts) -> None:
    algorithm = facts.config.algorithm
    if facts.config.replay is not None and algorithm.has_late_advantages:
        name, value = ("advantage", algorithm.advantage) if algorithm.has_critic else ("kl_in", algorithm.kl_in)
        rule = "makes advantages of the present policy's log-probs or values, and [replay] keeps those that groups had"
        raise UserError(f"algorithm.{name}", value, rule, 'use an advantage of the group\'s rewards, and kl_in = "loss"')


@rule(Needs.TRAINER, {"sync.running": "finish"})
def replayed_routing_is_of_one_version(facts: Facts) -> None:
    config = facts.config
    if config.placement.max_staleness and config.sync.running == "continue" and config.algorithm.routing_replay == "engine":
        rule = "replays one routing per token, and a completion that goes on over a switch has been routed by several versions"
        fix = 'set sync.running = "finish", or routing_replay = "none"'
        raise UserError("algorithm.routing_replay", "engine", rule, fix)


@rule(Needs.TRAINER, {"log.attribute_every": 0})
def attributed_tokens_are_of_one_version(facts: Facts) -> None:
    config = facts.config
    if (config.placement.max_staleness or config.replay) and config.log.attribute_every:
        rule = "tells causes apart for tokens of the trainer's own version only"
        fix = "set it to 0, or leave out [replay]" if config.replay else "set it to 0, or placement.max_staleness to 0"
        raise UserError("log.attribute_every", config.log.attribute_every, rule, fix)


@rule(Needs(0))
def agents_have_the_conversation_to_themselves(facts: Facts) -> None:
    config = facts.config
    if config.agent is None:
        return
    if config.environment is not None:
        raise UserError("agent", None, "and [environment] both answer the policy", "leave one of them out")
    if config.data.chat:
        rule = "puts a chat template around the question, which the endpoint does with an agent's messages"
        raise UserError("data.chat", True, rule, "set it to false: the agent gets the bare question")
    if config.agent.own_reward and (config.reward.function or config.reward.functions):
        rule = "leaves reward functions nothing to judge, and [reward] names some"
        raise UserError("agent.own_reward", True, rule, "leave out one of them")


@rule(Needs.TRAINER)
def episodes_have_one_advantage(facts: Facts) -> None:
    algorithm = facts.config.algorithm
    if facts.config.agent is not None and algorithm.has_late_advantages:
        name, value = ("advantage", algorithm.advantage) if algorithm.has_critic else ("kl_in", algorithm.kl_in)
        rule = "makes advantages of samples, of which an agent's episode may have several"
        raise UserError(f"algorithm.{name}", value, rule, 'use an advantage of the group\'s rewards, and kl_in = "loss"')


@rule(Needs.TRAINER)
def waits_are_no_hangs(facts: Facts) -> None:
    config = facts.config
    timeouts = {"rollout.request_timeout": config.rollout.request_timeout, "sync.timeout": config.sync.timeout}
    if config.agent is not None:
        timeouts["agent.timeout"] = config.agent.timeout
    name = max(timeouts, key=lambda field: timeouts[field])
    if 0 < config.log.stuck_after <= timeouts[name]:
        rule = f"must be longer than {name} ({timeouts[name]:g})"
        raise UserError("log.stuck_after", config.log.stuck_after, rule, f"raise it, lower {name}, or set it to 0")


@rule(Needs.TRAINER | Needs.MODEL)
def mtp_layers_are_there_to_train(facts: Facts) -> None:
    factor = facts.config.train.mtp_loss_scaling_factor
    if factor and not facts.model.mtp_layers:
        rule = f"trains layers for multi-token prediction, of which this {facts.model.family} model has none (num_nextn_predict_layers)"
        raise UserError("train.mtp_loss_scaling_factor", factor, rule, "leave it out")
    if factor and facts.model.tied:
        rule = "trains layers for multi-token prediction, which is not built for an output layer tied to the embedding"
        raise UserError("train.mtp_loss_scaling_factor", factor, rule, "leave it out: they are kept as they came")


@rule(Needs.TRAINER)
def adapters_are_built_for_the_run(facts: Facts) -> None:
    """What LoRA was not built and tested for."""
    config = facts.config
    if config.lora is None:
        return
    if config.algorithm.has_critic:
        raise UserError("lora", None, "is not built for a run with a critic", "leave it out, or use another algorithm.advantage")
    if config.log.attribute_every:
        rule = "computes with masters, which weights that [lora] freezes do not have"
        raise UserError("log.attribute_every", config.log.attribute_every, rule, "set it to 0")
    if config.sync.delta == "on":
        raise UserError("sync.delta", "on", "has nothing to add to [lora], which sends adapters alone", "leave it out")


@rule(Needs.TRAINER | Needs.MODEL)
def adapters_are_built_for_the_model(facts: Facts) -> None:
    lora = facts.config.lora
    if lora is None:
        return
    on_gpu = facts.contract.trainer_format.quantized and facts.config.precision.backend != "emulated"
    if facts.model.experts is not None and on_gpu and {"linear_fc1", "linear_fc2"} & set(lora.targets):
        rule = "names layers of experts, which an engine on a GPU computes in one kernel that adds no adapters"
        raise UserError("lora.targets", list(lora.targets), rule, "adapt attention alone: linear_qkv, linear_proj")
    if facts.model.latent is not None and "linear_qkv" in lora.targets:
        rule, rest = "names linear_qkv, of which latent attention has none", [each for each in lora.targets if each != "linear_qkv"]
        raise UserError("lora.targets", list(lora.targets), rule, f"set it to {rest}" if rest else "leave [lora] out, or use another model")
