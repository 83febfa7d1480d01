"""Checks of settings and layouts against the model. The planner runs the layout checks for each layout that it considers."""

import math
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.kernels.linear import requirements
from megatron_rl.preflight.rule import Facts, Needs, rule
from megatron_rl.sync.plan import SyncPlan
from parallel.attention import GatedDeltaNet, SinkAttention
from parallel.formats import FP8
from parallel.hf_config import MOST_POSITIONS, HFConfig
from parallel.layout_hints import find_engine_problem, find_trainer_problem, keep_first_layers, keep_one_replica, keep_shapes
from parallel.megatron_shards import check_layout
from parallel.row_sums import LEAF, holds_node
from parallel.shards import GeometryError


@rule(Needs.LAYOUT | Needs.LAUNCH)
def launch_has_the_layouts_ranks(facts: Facts) -> None:
    needed = facts.layout.world_size
    if needed != facts.ranks:
        rule = f"needs {needed} ranks (tp * cp * pp * dp), but this launch has {facts.ranks}"
        raise UserError("train.layout", None, rule, f"start with torchrun --nproc-per-node {needed}, or change train.layout")


@rule(Needs.LAYOUT)
def profiled_ranks_exist(facts: Facts) -> None:
    size, log = facts.layout.world_size, facts.config.log
    if log.profile_steps and (missing := [rank for rank in log.profile_ranks if rank >= size]):
        raise UserError("log.profile_ranks", missing[0], f"must be less than the number of ranks in train.layout ({size})", "lower it")


@rule(Needs.ENGINE)
def nodes_share_an_engine_evenly(facts: Facts) -> None:
    tp, nodes = facts.engine.tp, facts.engine.nodes
    if tp % nodes:
        raise UserError("rollout.nodes_per_engine", nodes, f"must divide rollout.tp ({tp})", "change one of them")


@rule(Needs.ENGINE | Needs.LAUNCH)
def nodes_share_the_engines_evenly(facts: Facts) -> None:
    engines, nodes, per_engine = facts.engine.engines, facts.engine_nodes, facts.engine.nodes
    if nodes % per_engine:
        rule = f"must divide the number of nodes with engines ({nodes})"
        raise UserError("rollout.nodes_per_engine", per_engine, rule, "change it, or use another number of nodes")
    if engines % (groups := nodes // per_engine):
        number = f"{nodes} nodes / rollout.nodes_per_engine = {per_engine}" if per_engine > 1 else str(nodes)
        rule = f"must be a multiple of the nodes with engines ({number}), because all run the same number of engines"
        raise UserError("rollout.engines", engines, rule, f"use {-(-engines // groups) * groups}, or another number of nodes")


@rule(Needs.MODEL)
def model_family_is_known(facts: Facts) -> None:
    facts.model  # noqa: B018 - raises for an unsupported model


@rule(Needs.MODEL)
def checkpoint_format_is_known(facts: Facts) -> None:
    find_checkpoint_format(facts.hf_config)


@rule(Needs.MODEL)
def longest_sequence_fits(facts: Facts) -> None:
    config, longest = facts.config, facts.config.longest_sequence
    fields = HFConfig(facts.hf_config)
    named = ["max_position_embeddings", *(name for name in ["model_max_length"] if fields.get(name) is not None)]  # SGLang reads either
    limit = min(fields.size(name, most=MOST_POSITIONS) for name in named)
    yarn = facts.model.rope.yarn
    reach = int(yarn.rotary_scaling_factor * yarn.original_max_position_embeddings) if yarn else 0
    other = f", or set {' and '.join(named)} of config.json to {reach}, as far as YaRN reaches" if reach >= longest else ""
    what = f"the model's {limit} positions"
    if (most := facts.model.most_tokens) is not None and most < limit:
        limit, what, other = most, f"index_topk ({most}) of config.json, up to which sparse attention selects every token", ""
    if longest > limit and config.agent:
        raise UserError("agent.max_tokens", config.agent.max_tokens, f"exceeds {what}", "lower it" + other)
    if longest > limit:
        environment = f" and environment.max_tokens ({config.environment.max_tokens})" if config.environment else ""
        rule = f"plus data.max_prompt_tokens ({config.data.max_prompt_tokens}){environment} exceeds {what}"
        raise UserError("rollout.max_new_tokens", config.rollout.max_new_tokens, rule, "lower one of them" + other)


@rule(Needs.ENGINE)
def engines_hold_the_longest_sequence(facts: Facts) -> None:
    """An engine would end longer completions early."""
    longest, rollout = facts.config.longest_sequence, facts.config.rollout
    held = {"max_total_tokens": rollout.max_total_tokens, "sglang.context_length": rollout.sglang.get("context_length")}
    for name, tokens in held.items():
        if isinstance(tokens, int) and tokens < longest:
            rule = f"is less than the longest sequence ({longest} tokens)"
            raise UserError(f"rollout.{name}", tokens, rule, "raise it, or shorten sequences")


@rule(Needs.MODEL | Needs.TRAINER)
def expert_settings_have_experts(facts: Facts) -> None:
    """Without experts, these settings would be ignored silently."""
    train, replay, experts, family = facts.config.train, facts.config.algorithm.routing_replay, facts.model.experts, facts.model.family
    rates = {"train.router_aux_loss": train.router_aux_loss, "train.router_bias_rate": train.router_bias_rate}
    for field, value in {**rates, "algorithm.routing_replay": "" if replay == "none" else replay}.items():
        if value and experts is None:
            raise UserError(field, value, f"needs a model with experts, but {family} has none", "leave it out")
    if train.router_bias_rate and experts is not None and not experts.correction_bias:
        rule = f"needs routers with a correction bias, but {family} has none"
        raise UserError("train.router_bias_rate", train.router_bias_rate, rule, "use train.router_aux_loss")


@rule(Needs.MODEL | Needs.LAYOUT)
def megatron_supports_the_layout(facts: Facts) -> None:
    layout, model = facts.layout, facts.model
    if model.vocab % layout.tp:  # padded rows would take part in the softmax
        raise UserError("train.layout.tp", layout.tp, f"must divide vocab_size ({model.vocab})", "use a divisor of it")
    for kind in dict.fromkeys(model.attention):
        kind.check_context_ranks(layout.tp, layout.cp)
    if model.experts is not None and layout.tp > 1 and not facts.config.train.layout.sequence_parallel:
        rule = f"is not supported for experts with tp = {layout.tp}, because Megatron requires sequence parallelism"
        raise UserError("train.layout.sequence_parallel", False, rule, "leave it out")
    if model.experts is None and layout.etp != layout.tp:  # it would be ignored silently
        raise UserError("train.layout.etp", layout.etp, f"needs a model with experts, but {model.family} has none", "leave it out")


@rule(Needs.MODEL | Needs.LAYOUT)
def trainer_can_shard_the_model(facts: Facts) -> None:
    """Heads, layers and experts must be divisible, and no shard boundary may cut a block of a quantized weight."""
    if error := find_trainer_problem(facts.model, facts.layout, facts.contract.format_of):
        raise _suggest_export(error, facts)
    check_layout(facts.model, facts.layout)  # also checks the pipeline stages


@rule(Needs.MODEL | Needs.ENGINE)
def engine_can_shard_the_model(facts: Facts) -> None:
    if error := find_engine_problem(facts.model, facts.engine.tp, facts.engine.ep, facts.contract.format_of):
        raise _suggest_export(error, facts)


def _suggest_export(error: GeometryError, facts: Facts) -> GeometryError:
    """Return the error. If padded matrices would solve it, add the `export` command that pads them."""
    block = facts.contract.engine_format.block
    if block is None or not _can_widen(facts) or error.field.split(".")[-1] in ("pp", "vpp", "ep"):
        return error
    trainer, engine = facts.layout, facts.engine
    sizes = {"--tensor-parallel": math.lcm(trainer.tp, engine.tp)}
    if facts.model.experts is not None:
        sizes["--expert-tensor-parallel"] = math.lcm(trainer.etp, engine.tp // engine.ep)
    path = facts.config.model.path if facts.path == Path() else facts.path
    words = [f"export --checkpoint {path} --output DIR --align {max(block)}", *(f"{name} {size}" for name, size in sizes.items())]
    return GeometryError(error.field, error.value, error.rule, f"{error.fix}, or wider matrices: megatron-rl {' '.join(words)}")


def _can_widen(facts: Facts) -> bool:
    """Return whether `export --align` knows the model."""
    return all(kind.can_widen for kind in facts.model.attention)


@rule(Needs.MODEL | Needs.LAYOUT | Needs.ENGINE)
def ranks_hold_whole_subtrees(facts: Facts) -> None:
    """The tree reduction adds up a row-parallel sum in the same order for any number of ranks if each rank holds a whole subtree."""
    if not facts.contract.sums_by_tree:
        return
    model, trainer, engine = facts.model, facts.layout, facts.engine
    whole = (("train.layout.tp", trainer.tp), ("rollout.tp", engine.tp))
    sums = [(field, ranks, name, width) for field, ranks in whole for name, width in model.row_parallel_widths.items()]
    if model.experts is not None:
        expert = ("mlp.experts.*.down_proj", model.experts.ffn)
        sums += [("train.layout.etp", trainer.etp, *expert), ("rollout.tp / rollout.ep", engine.tp // engine.ep, *expert)]
    for field, ranks, name, width in sums:
        if ranks > 1 and not holds_node(width, ranks):
            rule = f"with precision.reduction = 'tree' must be a power of two that divides {name} (width {width}) into multiples of {LEAF}"
            wider = f"wider matrices (export --align {LEAF}), " if _can_widen(facts) else ""
            raise UserError(field, ranks, rule, f"use another size, {wider}or precision.reduction = 'fast'")


@rule(Needs.TRAINER | Needs.MODEL | Needs.NODE)
def gpu_experts_do_not_use_the_tree(facts: Facts) -> None:
    """The precision graphs of the trainer and the engine would differ."""
    if facts.node_gpus and facts.contract.sums_by_tree and facts.model.experts is not None:
        rule = "is not supported for experts on a GPU, because SGLang's kernels for experts sum in another order"
        raise UserError("precision.reduction", "tree", rule, "use fast")


@rule(Needs.MODEL)
def engine_can_quantize_the_attention(facts: Facts) -> None:
    for kind in dict.fromkeys(facts.model.attention):
        if reason := kind.refuse_engine_format(facts.contract.engine_format):
            fix = "use bf16" if kind.refuse_engine_format(FP8) else "use fp8_rollout"
            raise UserError("precision.mode", facts.contract.mode, f"is not supported for {reason}", fix)


@rule(Needs.MODEL | Needs.NODE)
def sinks_are_computed_on_a_cpu(facts: Facts) -> None:
    if facts.node_gpus and any(isinstance(kind, SinkAttention) for kind in facts.model.attention):
        rule = "is a family whose attention with sinks has no kernel for GPUs yet"
        raise UserError(facts.option, facts.model.family, rule, "use another model, or CPUs")


@rule(Needs.MODEL)
def attention_supports_kv_scales_by_layer(facts: Facts) -> None:
    for kind in dict.fromkeys(facts.model.attention):
        if facts.contract.scales_kv_by_layer and (reason := kind.refuse_kv_scales_by_layer()):
            raise UserError("precision.kv", facts.contract.kv, f"is not supported for {reason}", "use high, or e4m3 on a CPU")


@rule(Needs.TRAINER | Needs.MODEL | Needs.NODE)
def shared_delta_rule_is_in_no_graph(facts: Facts) -> None:
    """An engine that computes gated delta nets by the trainer's kernels copies the lengths of prompts to the GPU."""
    options, contract = facts.config.rollout.sglang, facts.contract
    captured = [name for name in ("cuda_graph_config", "cuda_graph_backend_prefill") if options.get(name, "disabled") != "disabled"]
    shared = facts.node_gpus and contract.trainer_format.quantized == contract.engine_format.quantized
    if shared and captured and any(isinstance(kind, GatedDeltaNet) for kind in facts.model.attention):
        rule = "captures prompts as CUDA graphs, which is not supported for gated delta nets with the trainer's kernels"
        raise UserError(f"rollout.sglang.{captured[0]}", options[captured[0]], rule, "leave it out, or use precision.mode = 'fp8_rollout'")


@rule(Needs.MODEL | Needs.LAYOUT)
def backend_gets_whole_blocks(facts: Facts) -> None:
    requirements.check_model(facts.config.precision.backend, facts.contract.trainer_format, *keep_shapes(facts.model, facts.layout))


@rule(Needs.MODEL | Needs.LAYOUT | Needs.ENGINE | Needs.PLUGS)
def rows_fit_into_a_chunk(facts: Facts) -> None:
    model, trainer, engine = keep_first_layers(facts.model), keep_one_replica(facts.layout), facts.engine._replace(engines=1)
    SyncPlan.make(model, trainer, engine, facts.contract, facts.config.sync.chunk_bytes)
