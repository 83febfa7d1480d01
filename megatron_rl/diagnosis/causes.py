"""Names the likely cause of the first difference that a walk has found: the operators between the last equal results and the first
different one are the suspects, and the first of them with a wrong tensor or another precision is named. The precision graph says what lies
between."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.diagnosis.walk import LOGPROBS, Compared, Element, Walk
from megatron_rl.distributed import Rank0, gather_from_ranks, get_rank
from megatron_rl.precision.graph.decoder import LAYER
from megatron_rl.precision.graph.graph import FORWARD, PrecisionGraph
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.proof import cut_rect, find_differences, offset_rect
from parallel.formats import BLOCK
from parallel.reshard import Transfer

_SMALL_ULPS = 16
"""Differences up to this many units in the last place are likely those of another order of a sum."""
_INPUTS = {  # results that are inputs of an operator: (operator, its inputs)
    "attention.rope.q": ("attention.core", ("q", "q_rope")),
    "attention.rope.k": ("attention.core", ("k", "k_rope", "v")),
    "attention.core": ("attention.output", ("x",)),
}
_MODULES = {  # beginnings of names of engine tensors that no module of the table of operators has
    "mlp.experts.w13_": ("mlp.experts.gate_up",),
    "mlp.experts.w2_": ("mlp.experts.down",),
    "mlp.gate.": ("mlp.router",),
    "block_sparse_moe.experts.w13_": ("mlp.experts.gate_up",),
    "block_sparse_moe.experts.w2_": ("mlp.experts.down",),
    "block_sparse_moe.": ("mlp.router",),
    "linear_attn.conv1d.": ("attention.conv",),
    "linear_attn.A_log": ("attention.delta",),
    "linear_attn.dt_bias": ("attention.delta",),
    "attn.": ("attention.core",),  # of a hybrid family
    "self_attn.attn.": ("attention.core",),
    "self_attn.attn_mqa.": ("attention.core",),
    "self_attn.w_kc": ("attention.kv_b.k",),
    "self_attn.w_vc": ("attention.kv_b.v",),
    "self_attn.kv_b_proj.": ("attention.kv_b.k", "attention.kv_b.v"),
}
_ENDS = {"model.embed_tokens.": "embedding", "model.norm.": "norm", "lm_head.": "lm_head"}


@dataclass(frozen=True)
class Finding:
    """A wrong tensor, or a wrong precision, of one or more operators."""

    operators: tuple[str, ...]
    cause: str
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """The likely cause of the first difference."""

    operator: str
    cause: str
    text: str
    others: list[str] = field(default_factory=list)  # what else was found


def find_operators(tensor: str) -> tuple[str, ...]:
    """Return the operators that use an engine's tensor, by its name; the name itself if no operator is known."""
    for start, name in _ENDS.items():
        if tensor.startswith(start):
            return (name,)
    number, _, rest = tensor.removeprefix("model.layers.").partition(".")
    names = next((names for start, names in _MODULES.items() if rest.startswith(start)), ())
    paths = ((name, path) for name, (_, columns) in LAYER.items() for path in columns.get("sglang", ()))
    names += tuple(name for name, path in paths if rest.startswith(f"{path}.") and name not in names)
    return tuple(f"layers.{number}.{name}" for name in names) or (tensor,)


_Found = list[tuple[int, str, int, int, Finding]]


def find_wrong_bytes(transfers: Sequence[Transfer], engine: Rank0[Engine], named_tensors: Mapping[str, torch.Tensor]) -> list[Finding]:
    """Return the engine's weights whose bytes are not the trainer's, with the first element of each. Both sides hash every weight once,
    then blocks, rows, and elements of the wrong ones. Each rank needs the transfers that it sends. Collective."""
    parts = [each for each in transfers if each.source_rank == get_rank()]
    for rows, cols in ((0, 0), (BLOCK, BLOCK), (1, BLOCK), (1, 1)):
        parts = [part for each in parts for part in _split(each, rows, cols)]
        first: dict[tuple[int, str], Transfer] = {}
        for index in find_differences(parts, engine, named_tensors):
            first.setdefault((parts[index].target_rank, parts[index].target), parts[index])
        parts = list(first.values())
    own = [(each.target_rank, each.target, each.target_rect.row, each.target_rect.col, _describe_bytes(each)) for each in parts]
    found = (each for ranks in gather_from_ranks(own, _Found) for each in ranks)
    by_tensor: dict[tuple[int, str], Finding] = {}
    for rank, name, _, _, finding in sorted(found, key=lambda each: each[:4]):
        by_tensor.setdefault((rank, name), finding)
    return list(by_tensor.values())


def _split(each: Transfer, rows: int, cols: int) -> list[Transfer]:
    """Return a transfer in the parts of `cut_rect`."""
    corners = each.source_rect, each.target_rect
    places = ((offset_rect(part, corner) for corner in corners) for part in cut_rect(each.target_rect, rows, cols))
    return [each._replace(source_rect=source, target_rect=target) for source, target in places]


def _describe_bytes(each: Transfer) -> Finding:
    cause = "KV scale" if "kv_scales" in each.target else "scale of a weight" if each.of_scales else "weights"
    place = f"first at row {each.target_rect.row}, column {each.target_rect.col}"
    text = f"{each.target} of engine rank {each.target_rank} is not {each.source} of trainer rank {each.source_rank}, {place}"
    return Finding(find_operators(each.target), cause, text)


def find_other_precision(training: PrecisionGraph, rollout: Iterable[PrecisionGraph]) -> list[Finding]:
    """Return the operators of the engine that consume a tensor in another format than in the trainer's forward pass."""
    formats = {edge.key: str(edge.format) for edge in training.edges if edge.phase == FORWARD}
    findings = {}
    for graph in rollout:
        for edge in graph.edges:
            if (own := formats.get(edge.key, "absent")) != str(edge.format):
                cause = "activation scale" if edge.tensor == "x" and "1x" in str(edge.format) and "1x" in own else "precision"
                text = f"{edge.target} takes {edge.tensor} as {edge.format} in the engine, as {own} in the trainer"
                findings[text] = Finding((edge.target,), cause, text)
    return list(findings.values())


def describe_stale(stale: Iterable[Mapping[str, str]]) -> list[Finding]:
    """Return findings about the derived tensors that `RecordingEngine.find_stale_tensors` reports."""
    named = [(rank, name, text) for rank, tensors in enumerate(stale) for name, text in tensors.items()]
    return [Finding(find_operators(name), "derived tensor", f"{name} of engine rank {rank}: {text}") for rank, name, text in named]


def find_suspects(graph: PrecisionGraph, op: str, equal: Iterable[str]) -> list[str]:
    """Return the operators between the results `equal` and the result `op`, in the order of computation."""
    sources = defaultdict[str, list[tuple[str, str]]](list)
    for edge in graph.edges:
        if edge.phase == FORWARD:
            sources[edge.target].append((edge.tensor, edge.source))
    order = [node.name for node in graph.nodes if node.op != "weight"]
    equal, producers = set(equal), _list_producers(op, sources, order)
    known = _collect_upstream([name for each in equal for name in _list_producers(each, sources, order)], sources)
    suspects = _collect_upstream(producers, sources) - known | (set(producers) - equal)
    return [name for name in order if name in suspects]


def _collect_upstream(names: Iterable[str], sources: Mapping[str, list[tuple[str, str]]]) -> set[str]:
    """Return the operators with these names, and all on which they depend."""
    pending, found = list(names), set[str]()
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending += [source for _, source in sources.get(name, ())]
    return found


def _list_producers(op: str, sources: Mapping[str, list[tuple[str, str]]], order: list[str]) -> list[str]:
    """Return the graph's operators that make a recorded result."""
    if op == "norm.input":
        return [source for tensor, source in sources["norm"] if tensor == "x"]
    layer, name = op.rpartition(".")[0], op
    if op.startswith("layers."):
        _, number, name = op.split(".", 2)
        layer = f"layers.{number}."
    if name == "input":
        return [source for tensor, source in sources[f"{layer}input_norm"] if tensor == "x"]
    if name == "mlp":
        ends = (f"{layer}{end}" for end in ("mlp.down", "mlp.experts.sum", "mlp.shared_experts.down"))
        return [end for end in ends if end in order]
    if name in _INPUTS:
        target, tensors = _INPUTS[name]
        return [source for tensor, source in sources[f"{layer}{target}"] if tensor in tensors]
    return [op]


def diagnose(walk: Walk, element: Element | None, graph: PrecisionGraph, findings: list[Finding]) -> Diagnosis | None:
    """Return the likely cause of the walk's first difference, or that of a wrong tensor that the prompt did not reach; None for neither."""
    first, order = walk.first, [node.name for node in graph.nodes]
    if first is None:
        suspects = [*order, *(each.operators[0] for each in findings if not any(op in order for op in each.operators))]
        findings = [each for each in findings if each.cause != "precision"]
    else:
        suspects = find_suspects(graph, first.op, [each.op for each in walk.compared[: walk.compared.index(first)] if each.op != first.op])
    texts = [each.text for each in findings]
    for operator in suspects:
        for finding in (each for each in findings if operator in each.operators):
            texts.remove(finding.text)
            return Diagnosis(
                operator, finding.cause, finding.text + ("; no result of this prompt shows it" if first is None else ""), texts
            )
    if first is None:
        return None
    core = [name for name in suspects if name.endswith("attention.core")]
    operator = (core or suspects or [first.op])[-1]
    cause, text = _guess(walk, first, element, bool(core))
    return Diagnosis(operator, cause, text + (f"; it is one of {', '.join(suspects)}" if len(suspects) > 1 else ""), texts)


def _guess(walk: Walk, first: Compared, element: Element | None, attends: bool) -> tuple[str, str]:
    """Return cause and text if weights, derived tensors, and precision are equal."""
    equal = "inputs, weights, derived tensors, and precision are equal"
    if first.op == LOGPROBS:
        return "sampling", "the logits are equal: temperature, a filter, or the log-softmax differs"
    if attends and (walk.uncomputed or (first.differing[0] >= walk.prompt_tokens and len(first.differing) < len(first.tokens))):
        why = f"{walk.uncomputed} tokens came from the prefix cache" if walk.uncomputed else "only decoded tokens differ"
        return "KV cache", f"queries and new keys are equal, and {why}: cached keys or values differ, or the kernel that reads them"
    if element is not None and not math.isfinite(element.engine):
        return "not finite", f"{equal}, and the engine's result holds {element.engine}: its kernel overflows, or reads other memory"
    if element is not None and element.ulps <= _SMALL_ULPS:
        return "order of a sum", f"{equal}, and the difference is {element.ulps:.3g} units in the last place"
    return "kernel", f"{equal}, and the difference is larger than rounding: the kernel, or a tensor that no check knows"
