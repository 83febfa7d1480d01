"""What `precision.reduction = "ranks"` refuses: it promises a mismatch of 0, so a setting without a common kernel of trainer and engine
is refused by name. docs/reference/precision.md has the same rows.

Refused in every mode, by `rollout_sglang.server_options`: torch.compile and inductor, mixed chunks, speculative decoding, quantized
communication, fused all-reduces, and options that choose other kernels, such as `decode_attention_backend`. Missing FlashAttention 3 and
DeepGEMM are refused by `machine`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.kernels.attention.requirements import HEAD_WIDTHS, SPLIT_WIDTHS, choose_shared
from megatron_rl.preflight.rule import Facts, Needs, rule
from megatron_rl.rollout.engine_packages import HOPPER
from parallel.attention import SoftmaxAttention
from parallel.row_sums import count_parts


class Limit(NamedTuple):
    """A setting that is refused."""

    field: str
    find: Callable[[Facts], Any]  # returns the refused value, or None if the setting is supported
    rule: str
    fix: str


def _find_experts(facts: Facts) -> str | None:
    return None if facts.model.experts is None else facts.model.family


def _find_other_attention(facts: Facts) -> str | None:
    return facts.model.family if any(type(kind) is not SoftmaxAttention for kind in facts.model.attention) else None


def _get_option(facts: Facts, name: str) -> Any:
    """Return a value of `rollout.sglang`, or None if it is missing or false."""
    return facts.config.rollout.sglang.get(name) or None


def _find_prefill_graphs(facts: Facts) -> Any:
    shared = choose_shared(facts.model.attention, _get_option(facts, "attention_backend"))
    return _find_other(_get_option(facts, "cuda_graph_backend_prefill"), "disabled", *(["breakable"] if shared == "fa3" else []))


def _find_head_width(facts: Facts) -> int | None:
    known = HEAD_WIDTHS if _get_option(facts, "attention_backend") == "fa3" else SPLIT_WIDTHS
    widths = {getattr(kind, "head_dim", 0) for kind in facts.model.attention} - {*known}
    return max(widths, default=None)


def _find_other(value: Any, *supported: str) -> Any:
    return None if value in supported else value


def _known(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))


ANYWHERE = (
    Limit(
        "precision.mode",
        lambda facts: facts.contract.mode if facts.contract.trainer_format != facts.contract.engine_format else None,
        "quantizes the engine alone, but precision.reduction = 'ranks' promises a mismatch of 0",
        "use fp8_unified or bf16",
    ),
    Limit(
        "precision.scale_format",
        lambda facts: "fp32" if facts.contract.trainer_format.quantized and facts.contract.scale_format == "fp32" else None,
        "is applied in another order by each kernel, so precision.reduction = 'ranks' does not support it",
        "use pow2",
    ),
    Limit(
        "lora.rank",
        lambda facts: facts.config.lora and facts.config.lora.rank,
        "adds products of adapters, for which precision.reduction = 'ranks' has no common kernel",
        "use precision.reduction = 'tree', or train without [lora]",
    ),
)
"""Settings that are refused on every device."""

OF_MODELS = tuple(
    Limit(
        "model.path",
        find,
        f"has {part}, for which trainer and engine have no common kernels with precision.reduction = 'ranks'",
        "use precision.reduction = 'fast', or 'tree' on a CPU",
    )
    for part, find in (
        ("experts", _find_experts),
        ("attention other than plain softmax (gated delta nets, latent attention, or sinks)", _find_other_attention),
    )
)
"""Models that are refused on every device."""

ON_GPUS = (
    Limit(
        "precision.reduction",
        lambda facts: "ranks" if facts.capability[0] != HOPPER else None,
        "needs Hopper GPUs, for whose kernels alone equal bits are promised",
        "use fast",
    ),
    Limit(
        "precision.kv",
        lambda facts: facts.contract.kv if facts.contract.kv != "high" else None,
        "rounds queries and probabilities in FlashAttention 3, in tiles that follow the number of rows",
        "use high",
    ),
    Limit(
        "precision.high",
        lambda facts: "fp32" if facts.contract.high == "fp32" else None,
        "is not the dtype of the attention kernels that precision.reduction = 'ranks' has on a GPU",
        "use bf16",
    ),
    Limit(
        "precision.backend",
        lambda facts: facts.contract.backend if facts.contract.trainer_format.quantized and facts.contract.backend != "deep_gemm" else None,
        "is another library than the engine's DeepGEMM, but precision.reduction = 'ranks' promises a mismatch of 0",
        "use deep_gemm",
    ),
    Limit(
        "config.json head_dim",
        _find_head_width,
        f"is not a known width of attention: {_known(HEAD_WIDTHS)} with FlashAttention 3, {_known(SPLIT_WIDTHS)} by this project's kernel",
        "leave out rollout.sglang.attention_backend, or use precision.reduction = 'fast'",
    ),
    Limit(
        "rollout.nodes_per_engine",
        lambda facts: facts.engine.nodes if facts.engine.nodes > 1 else None,
        "adds over nodes by NCCL, whose order precision.reduction = 'ranks' does not know",
        "use 1, or precision.reduction = 'fast'",
    ),
    Limit(
        "rollout.sglang.attention_backend",
        lambda facts: _find_other(_get_option(facts, "attention_backend"), "fa3", "triton"),
        "is a kernel that the trainer does not have, but precision.reduction = 'ranks' promises a mismatch of 0",
        "leave it out",
    ),
    *(
        Limit(
            f"rollout.sglang.{name}",
            find,
            "may capture the attention of prompts, for which precision.reduction = 'ranks' promises no order of sums",
            "leave it out, or use an option of decoding alone, such as cuda_graph_bs_decode",
        )
        for name, find in (
            ("cuda_graph_backend_prefill", _find_prefill_graphs),
            ("cuda_graph_config", partial(_get_option, name="cuda_graph_config")),
        )
    ),
    *(
        Limit(
            f"rollout.sglang.{name}",
            partial(_get_option, name=name),
            "adds over ranks by other kernels or NVLink multicast, but precision.reduction = 'ranks' has one order of sums",
            "leave it out, or use precision.reduction = 'fast'",
        )
        for name in ("disable_custom_all_reduce", "enable_mscclpp", "enable_nccl_nvls", "enable_symm_mem", "enable_torch_symm_mem")
    ),
)
"""Settings that are refused on GPUs, by the reasons of docs/reference/precision.md."""


def refuse(facts: Facts, limits: tuple[Limit, ...]) -> None:
    """Raise UserError for the first setting that `precision.reduction = "ranks"` does not support."""
    for limit in limits if facts.contract.sums_by_ranks else ():
        if (value := limit.find(facts)) is not None:
            field = facts.option if limit.field == "model.path" else limit.field
            raise UserError(field, value, limit.rule, limit.fix)


@rule(Needs.TRAINER)
def ranks_support_the_settings(facts: Facts) -> None:
    refuse(facts, ANYWHERE)


@rule(Needs.TRAINER | Needs.MODEL)
def ranks_support_the_model(facts: Facts) -> None:
    refuse(facts, OF_MODELS)


@rule(Needs.TRAINER | Needs.MODEL | Needs.NODE | Needs.ENGINE)
def ranks_support_the_gpus(facts: Facts) -> None:
    if facts.node_gpus:
        refuse(facts, ON_GPUS)


@rule(Needs.MODEL | Needs.LAYOUT | Needs.ENGINE)
def parts_are_shared_evenly(facts: Facts) -> None:
    """Each rank holds whole parts of a sum. That FP8 parts are whole blocks holds since the larger tp's shards are."""
    trainer, engine = facts.layout.tp, facts.engine.tp
    parts = count_parts(trainer, engine)
    if facts.contract.sums_by_ranks and (parts % trainer or parts % engine):
        rule = f"must be a multiple or a divisor of train.layout.tp ({trainer}) with precision.reduction = 'ranks'"
        raise UserError("rollout.tp", engine, rule, "use another size, or precision.reduction = 'fast'")
