"""Records results of a running model's operators with PyTorch hooks on modules that are found by name, in trainer and engine.

Operators have the names of the precision graph, with five more: `input` of a layer and `norm.input` are the residual stream,
`attention.rope.q` and `attention.rope.k` are queries and keys as the attention gets them, and `mlp` is the result of dense MLP or experts.
`attention.core` is the input of the output projection, `mlp.router` the weights of a token's experts. The tables use the signs of the
precision graph's (`graph.decoder.MODULES`), except for `attn`, which in a gated delta net is another operator.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from megatron_rl.precision.graph.decoder import MODULES, OPERATORS, expand

TRAINER, ENGINE = 0, 1


class HookPoint(NamedTuple):
    """Where an operator's result is seen on one side."""

    op: str
    columns: str  # how tensor-parallel ranks share its columns (`number_columns`)
    module: str  # pattern of the module's name, in which a group stands for the number of the layer
    place: str  # "out" or "out1": the module's output, or the second of its outputs; "in0", "in1": a positional argument


_LAYERS = "decoder.layers.*.", "model.layers.*."
_TABLE = """
    input                whole  input_layernorm:in0      input_layernorm:out1
    input_norm           whole  input_layernorm:out      input_layernorm:out
    @qkv                 qkv    @linear_qkv:out          @qkv_proj:out
    @q_norm              split  @q_layernorm:out         @q_norm:out
    @k_norm              kv     @k_layernorm:out         @k_norm:out
    @q_a                 whole  @q_layernorm:in0         @q_a_layernorm:in0
    @q_a_norm            whole  @q_layernorm:out         @q_a_layernorm:out
    @q_b                 split  @linear_q_up_proj:out    @q_b_proj:out
    @q_b                 split  @linear_q_proj:out       @q_proj:out
    @kv_a                whole  @kv_layernorm:in0        @kv_a_layernorm:in0
    @kv_a_norm           whole  @kv_layernorm:out        @kv_a_layernorm:out
    @rope.q              split  @core_attention:in0      self_attn.attn:in0 attn:in0 self_attn.attn_mqa:in0
    @rope.k              kv     @core_attention:in1      self_attn.attn:in1 attn:in1 self_attn.attn_mqa:in1
    @core                split  @linear_proj:in0         @o_proj:in0
    @output              sum    @linear_proj:out         @o_proj:out
    @gate_norm           split  @out_proj:in0            @out_proj:in0
    @output              sum    @out_proj:out            @out_proj:out
    @post_norm           whole  self_attn_bda.norm:out   post_self_attn_layernorm:out
    @residual            whole  pre_mlp_layernorm:in0    post_attention_layernorm:out1
    post_attention_norm  whole  pre_mlp_layernorm:out    post_attention_layernorm:out
    mlp.gate_up          pairs  mlp.linear_fc1:out       mlp.gate_up_proj:out
    mlp.swiglu           split  mlp.linear_fc2:in0       mlp.down_proj:in0
    mlp.down             sum    mlp.linear_fc2:out       mlp.down_proj:out
    mlp.router           whole  mlp.router:out           mlp.topk:out block_sparse_moe.topk:out
    %gate_up             pairs  %linear_fc1:out          %gate_up_proj:out
    %swiglu              split  %linear_fc2:in0          %down_proj:in0
    mlp                  sum    mlp:out                  mlp:out block_sparse_moe:out
    mlp.post_norm        whole  mlp_bda.norm:out         post_mlp_layernorm:out
"""
_ENDS = """
    embedding                   whole  embedding:out                         model.embed_tokens:out
    norm.input                  whole  decoder.final_layernorm:in0           model.norm:out1
    norm                        whole  decoder.final_layernorm:out           model.norm:out
"""


def list_hook_points(side: int) -> list[HookPoint]:
    """Return the points of one side, TRAINER or ENGINE. In their names, `*` stands for the number of a layer."""
    points, signs = [], MODULES["sglang" if side == ENGINE else "megatron"]
    for table, prefix, path in ((_TABLE, "layers.*.", _LAYERS[side]), (_ENDS, "", "")):
        for op, columns, trainer, *engine in map(str.split, table.strip().splitlines()):
            for text in engine if side == ENGINE else [trainer]:
                name, _, place = text.partition(":")
                points += [HookPoint(prefix + expand(op, OPERATORS)[0], columns, path + each, place) for each in expand(name, signs)]
    return points


def attach_hooks(
    modules: Iterable[tuple[str, torch.nn.Module]],
    points: Iterable[HookPoint],
    record: Callable[[str, HookPoint, torch.Tensor], torch.Tensor | None],
) -> list[RemovableHandle]:
    """Call `record(operator, point, tensor)` at every point, whenever the module runs, until `remove()` is called on the returned handles.
    What it returns for a module's output, if anything, replaces that output. `modules`: names over the whole model."""
    handles = []
    patterns = [(point, re.compile(re.escape(point.module).replace(r"\*", r"(\d+)"))) for point in points]
    for name, module in modules:
        for point, pattern in patterns:
            if match := pattern.fullmatch(name):
                op = point.op.replace("*", match[1]) if match.groups() else point.op
                handles.append(module.register_forward_hook(_make_hook(op, point, record)))
    return handles


def _make_hook(op: str, point: HookPoint, record: Callable[[str, HookPoint, torch.Tensor], torch.Tensor | None]) -> Callable[..., Any]:
    kind, number = point.place.rstrip("01"), int(point.place[-1]) if point.place[-1].isdigit() else 0

    def hook(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        values = inputs if kind == "in" else output if isinstance(output, tuple) else (output,)
        if number >= len(values) or values[number] is None:
            return None
        tensor = _weigh_experts(values) if op.endswith("mlp.router") else values[number].detach()
        changed = None if tensor is None else record(op, point, tensor)
        if changed is None or kind == "in":
            return None
        return (*values[:number], changed, *values[number + 1 :]) if isinstance(output, tuple) else changed

    return hook


def _weigh_experts(values: Any) -> torch.Tensor | None:
    """Return the weights `[tokens, experts]` of a token's experts, 0 for the others: from Megatron's (weights, mask), or from SGLang's
    (weights `[tokens, k]`, experts `[tokens, k]`, logits). Return None for another form."""
    if len(values) == 2:
        return (values[0] * values[1]).detach()
    if not hasattr(values, "topk_weights"):
        return None
    weights = torch.zeros_like(values.router_logits, dtype=torch.float32)
    return weights.scatter_(-1, values.topk_ids.long(), values.topk_weights.float()).detach()


class RankHeads(NamedTuple):
    """A tensor-parallel rank, and the heads of the whole model."""

    rank: int
    size: int
    queries: int
    keys: int  # 1 for latent attention


def number_columns(kind: str, width: int, heads: RankHeads) -> torch.Tensor | None:
    """Return the numbers, int64 `[width]`, of a rank's columns in the whole tensor, or None if another rank holds the same columns.

    Kinds: `whole` on every rank; `split` into equal parts; `pairs` of equal parts, [gate | up]; `kv`: heads of keys, which ranks share if
    they are more; `qkv`: the rank's heads as [q | k | v].
    """
    rank, size = heads.rank, heads.size
    own = torch.arange(width)
    if kind == "whole":
        return own if rank == 0 else None
    if kind == "split":
        return own + rank * width
    if kind == "pairs":
        half = width // 2
        return torch.cat([own[:half] + rank * half, own[half:] + half * (size - 1) + rank * half])
    sharing = max(1, size // heads.keys)  # ranks with the same head of keys
    if kind == "kv":
        return own + rank // sharing * width if rank % sharing == 0 else None
    queries, keys = heads.queries // size, max(1, heads.keys // size)
    dim = width // (queries + 2 * keys)
    firsts = (0, heads.queries, heads.queries + heads.keys)
    counts = (queries, keys, keys) if rank % sharing == 0 else (queries, 0, 0)
    starts = (rank * queries, rank // sharing * keys, rank // sharing * keys)
    return torch.cat(
        [
            torch.arange((first + start) * dim, (first + start + count) * dim)
            for first, start, count in zip(firsts, starts, counts, strict=True)
        ]
    )
