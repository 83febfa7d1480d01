"""Checks of what this machine and nodes like it can run. Torch is only imported inside, because `plan` runs some of them without it."""

import os
from typing import Any

from megatron_rl.config.hosts import is_loopback
from megatron_rl.errors import UserError
from megatron_rl.kernels import blackwell
from megatron_rl.kernels.attention import requirements as attention
from megatron_rl.kernels.linear import requirements
from megatron_rl.preflight.rule import Facts, Needs, rule
from megatron_rl.rollout import engine_packages, memory_saver
from megatron_rl.rollout.engine import find_engine_launcher
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE, find_meeting_host, get_base_gpu_id, list_launchers, place_engine


@rule(Needs.TRAINER | Needs.MACHINE)
def backend_runs_here(facts: Facts) -> None:
    precision, format = facts.config.precision, facts.contract.trainer_format
    experts = bool(facts.hf_config) and facts.model.experts is not None
    if format.quantized and (missing := requirements.find_missing(precision.backend, format, experts)):
        rule = "cannot run here: " + ", ".join(reason for reason, _ in missing)
        raise UserError("precision.backend", precision.backend, rule, "; ".join([fix for _, fix in missing] + ["or use emulated"]))


@rule(Needs.ENGINE)
def scales_suit_blackwell(facts: Facts) -> None:
    if facts.capability[0] != blackwell.BLACKWELL:
        return
    for format in (facts.contract.trainer_format, facts.contract.engine_format):
        if format.quantized and (problem := blackwell.find_blackwell_problem(format)):
            field, rule, fix = problem
            raise UserError(f"precision.{field}", getattr(facts.config.precision, field), rule, fix)


@rule(Needs.TRAINER | Needs.NODE | Needs.MACHINE)
def attention_runs_here(facts: Facts) -> None:
    """FP32 attention is not torch's `varlen_attn`."""
    high = facts.config.precision.high
    if facts.node_gpus and high == "bf16" and (problem := attention.find_attention_problem()):
        raise UserError("precision.high", high, f"cannot attend on a GPU: {problem}", attention.INSTALL_HINT)


def _list_engine_options(facts: Facts) -> dict[str, Any]:
    """Return `rollout.sglang` with the attention that this project chooses for a known model."""
    options = dict(facts.config.rollout.sglang)
    if facts.contract.sums_by_ranks and facts.hf_config:
        options["attention_backend"] = attention.choose_shared(facts.model.attention, options.get("attention_backend"))
    return options


@rule(Needs.ENGINE | Needs.NODE | Needs.MACHINE)
def shared_kernels_run_here(facts: Facts) -> None:
    """Trainer and engine share DeepGEMM's products, in BF16 too, and FlashAttention 3, if it is their attention."""
    if not facts.node_gpus or not facts.contract.sums_by_ranks:
        return
    missing = requirements.find_missing("deep_gemm")
    if not missing and not requirements.has_deterministic_mode():
        missing = [("the installed DeepGEMM has no deterministic mode", requirements.PINNED_DEEP_GEMM)]
    if _list_engine_options(facts).get("attention_backend") == "fa3" and not engine_packages.has_flash_attention_3():
        fix = f"{engine_packages.INSTALL}, or set {engine_packages.ATTENTION} to triton"
        missing.append(("sglang-kernel has no FlashAttention 3 (flash_ops)", fix))
    if missing:
        reasons, fixes = zip(*missing, strict=True)
        raise UserError("precision.reduction", "ranks", f"cannot run here: {', '.join(reasons)}", "; ".join([*fixes, "or use fast"]))


@rule(Needs.TRAINER | Needs.NODE | Needs.MACHINE)
def kernels_can_be_compiled(facts: Facts) -> None:
    """Norms, rotary positions, and log-probs are Triton kernels, also in modes and for backends that need nothing else."""
    if facts.node_gpus and (problem := requirements.find_triton_problem()):
        reason, fix = problem
        raise UserError("precision.mode", facts.contract.mode, f"cannot run on a GPU: {reason}", fix)


@rule(Needs.TRAINER | Needs.MACHINE)
def transport_works_here(facts: Facts) -> None:
    from megatron_rl.sync.checks import check_transport

    check_transport(facts.config.sync, shared=facts.config.placement.kind == "colocated")


@rule(Needs.ENGINE | Needs.NODE)
def engine_fits_on_a_node(facts: Facts) -> None:
    tp, nodes, gpus = facts.engine.tp, facts.engine.nodes, facts.node_gpus
    capacity = f"{gpus} GPUs per node * rollout.nodes_per_engine = {gpus * nodes} GPUs"
    if 0 < gpus < tp // nodes:
        raise UserError("rollout.tp", tp, f"exceeds {capacity}", "lower it, or raise rollout.nodes_per_engine")
    if nodes > 1 and tp // nodes < gpus:
        raise UserError("rollout.tp", tp, f"does not use all of {capacity}", "raise it, or lower rollout.nodes_per_engine")


@rule(Needs.ENGINE | Needs.NODE | Needs.MACHINE)
def engines_fit_on_their_nodes(facts: Facts) -> None:
    """All nodes are assumed to be like this machine."""
    rollout, gpus = facts.config.rollout, facts.node_gpus
    trainer_gpus = get_base_gpu_id(facts.config, place_engine(rollout, 0)[0])
    if 0 < gpus < trainer_gpus + rollout.engines_per_node * rollout.ranks_per_node:
        share = f" / {len(rollout.hosts)} nodes" if len(rollout.hosts) > 1 else ""
        needed = f"{rollout.engines_per_node} * {rollout.ranks_per_node} GPUs per node (rollout.engines{share} * rollout.tp)"
        beside = f" in addition to the trainer's {trainer_gpus}" if trainer_gpus else ""
        raise UserError("rollout.engines", rollout.engines, f"needs {needed}{beside}, but this machine has {gpus}", "lower one of them")


@rule(Needs.ENGINE | Needs.NODE)
def kv_scales_by_token_run_on_a_cpu(facts: Facts) -> None:
    if facts.contract.kv == "e4m3" and facts.node_gpus:
        rule = "only runs on CPUs, because SGLang's GPU kernels do not read a scale per token and head"
        raise UserError("precision.kv", facts.contract.kv, rule, "use e4m3_per_layer, or high with latent attention (MLA)")


@rule(Needs.ENGINE | Needs.MACHINE)
def engine_accepts_its_options(facts: Facts) -> None:
    find_engine_launcher(facts.config.rollout.engine).check(facts.config)


@rule(Needs.ENGINE | Needs.MACHINE)
def nodes_have_separate_launchers(facts: Facts) -> None:
    hosts = facts.config.rollout.hosts
    launchers = list_launchers()[: len(hosts)]
    if len(launchers) < len(hosts):
        rule = f"names {len(hosts)} nodes, but {LAUNCHER_VARIABLE} has launchers for {len(launchers)}"
        raise UserError("rollout.hosts", list(hosts), rule, "start with launch/slurm, or set one line in the variable for each node")
    if repeated := [line for line in launchers if launchers.count(line) > 1]:
        where = f"by {repeated[0]!r}" if repeated[0] else "on this machine"
        rule = f"starts the engines of two nodes {where}, on the same devices"
        raise UserError(LAUNCHER_VARIABLE, None, rule, "set a different line for each entry of rollout.hosts")


@rule(Needs.ENGINE | Needs.MACHINE)
def nodes_reach_the_engines_first_node(facts: Facts) -> None:
    rollout, host = facts.config.rollout, facts.config.sync.host
    engines = (place_engine(rollout, number) for number in range(rollout.engines))
    if any(is_loopback(find_meeting_host(engine, host)) and not is_loopback(node.host) for engine in engines for node in engine):
        rule = f"is only reachable from this machine, but an engine's ranks on {rollout.nodes_per_engine} nodes must connect to it"
        raise UserError("sync.host", host, rule, "give an address of this machine that the other nodes can reach")


@rule(Needs.TRAINER | Needs.MACHINE)
def transport_reaches_the_engines(facts: Facts) -> None:
    if any(list_launchers()[: len(facts.config.rollout.hosts)]):
        from megatron_rl.sync.checks import check_one_host

        check_one_host(facts.config.sync, f"{LAUNCHER_VARIABLE} starts engines on other hosts")


@rule(Needs.ENGINE | Needs.NODE | Needs.MACHINE)
def engine_can_release_its_memory(facts: Facts) -> None:
    if facts.node_gpus and facts.config.placement.kind == "colocated" and facts.config.rollout.engine == "sglang":
        import torch

        memory_saver.check(os.environ, torch.version.cuda)


@rule(Needs.ENGINE | Needs.NODE | Needs.MACHINE)
def engine_has_its_packages(facts: Facts) -> None:
    rollout = facts.config.rollout
    if facts.node_gpus and rollout.engine == "sglang":
        engine_packages.check(_list_engine_options(facts), facts.contract.scales_kv_by_layer, facts.capability[0])
