"""Mixture-of-experts layers whose outputs have the same bits however ranks share experts (`ep`) and shard each of them (`etp`).

An expert's output is a row-parallel sum: the FP32 partial sums of its ranks, added in tree order (`kernels.sums.reference`) and rounded
once. It is multiplied by the token's weight and rounded. The token's own rank adds the outputs of its experts in tree order over expert
numbers (`kernels.experts.expert_sum`) and rounds once.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.experts.expert_sum import sum_experts
from megatron_rl.kernels.experts.reference import group_parts, place_tokens, scatter_tokens, sum_tokens, weigh
from megatron_rl.kernels.linear.reference import project_up
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.mcore.base import two_batch
from megatron_rl.mcore.base.exchange import exchange_rows
from megatron_rl.mcore.base.names import ModelChunks, iter_modules
from megatron_rl.mcore.base.weight_gradient import take_weight
from megatron_rl.mcore.layers.linear.quantized_linear import list_quantized_layers
from megatron_rl.mcore.layers.moe import token_counts
from megatron_rl.mcore.layers.moe.forecast import LayerForecast
from megatron_rl.mcore.layers.moe.grouped_experts import GroupedLinear, can_group, have_grouped_products, run_experts
from megatron_rl.mcore.layers.moe.router import Router
from megatron_rl.mcore.layers.moe.token_counts import LayerCounts, gather_counts, start_count


class OutputWeightedExperts(SequentialMLP):
    """Megatron's experts, but a token's weight multiplies the expert's output, as in every engine. Megatron multiplies the second layer's
    input, which changes the result once that input is quantized. If the backend has grouped products, all experts run at once
    (`grouped_experts`) with the same sums as one after the other."""

    _grouped: tuple[GroupedLinear, GroupedLinear] | None = None

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor | TokenGroups, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return outputs [T, h], which Megatron adds over the ranks of an expert. Tokens [T, h] (or packed by `scatter_tokens`) are sorted
        by expert, with weights [T]. Grouped experts may also get tokens as received from the ranks, with their groups."""
        if self.runs_grouped:
            groups = tokens_per_expert
            if not isinstance(groups, TokenGroups):
                groups = TokenGroups.from_counts(groups, permuted_probs.device)
            gives_turn = self.config.sequence_parallel
            return run_experts(permuted_local_hidden_states, permuted_probs, groups, *self._layers, gives_turn), None
        assert isinstance(tokens_per_expert, torch.Tensor)
        counts = tokens_per_expert.tolist()  # on the host already: the dispatcher waits for them once per layer
        tokens = permuted_local_hidden_states.split(counts)
        pairs = zip(self.local_experts, tokens, strict=True)
        y = torch.cat([_run_expert(mlp, x) for mlp, x in pairs])
        if self.config.sums_by_tree and self.tp_group.size() > 1:
            y, added = self._sum_adapters(y, counts, permuted_local_hidden_states.dtype)
            return _WeightedSum.apply(y, permuted_probs, self.tp_group, permuted_local_hidden_states.dtype, added), None
        return _Weigh.apply(y, permuted_probs), None

    def _sum_adapters(self, y: torch.Tensor, counts: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split y into the partial sums [T, h] of second layers and the output [T, h] of their adapters, or None without adapters. The
        adapters' partial sums are appended to y's columns (`mcore.weights.adapters`)."""
        rank = y.shape[1] - self.config.hidden_size
        if not rank:
            return y, None
        y, down = y.split([self.config.hidden_size, rank], -1)
        layers, down = [mlp.linear_fc2 for mlp in self.local_experts], _TreeSum.apply(down, self.tp_group, dtype)
        parts = zip(down.split(counts), layers, strict=True)
        return y, torch.cat([project_up(part, take_weight(layer.lora_B), layer.adapter_scale) for part, layer in parts])

    @property
    def runs_grouped(self) -> bool:
        """Whether all experts run at once."""
        return not self.config.sums_by_tree and can_group([layer for layers in self._list_layers() for layer in layers])

    def _list_layers(self) -> tuple[list[Any], list[Any]]:
        """Return (first layers, second layers) of all experts."""
        return [mlp.linear_fc1 for mlp in self.local_experts], [mlp.linear_fc2 for mlp in self.local_experts]

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield modules as torch does, but with grouped experts all first layers precede all second layers, each from the last expert to
        the first. Megatron lays out gradients in reverse order. The gradients of all first layers are then adjacent, and WGrad adds to them
        in place."""
        found, layers = list(super().named_modules(memo, prefix, remove_duplicate)), self._list_layers()
        if not self.config.sums_by_tree and have_grouped_products([*layers[0], *layers[1]]):
            places = {layer: place for place, layer in enumerate(layer for each in layers for layer in reversed(each))}
            found.sort(key=lambda entry: places.get(entry[1], -1))
        yield from found

    def scatter_tokens(self, x: torch.Tensor, order: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """Return what is sent to the experts for tokens x [n, h], in the order of `kernels.experts.reference`. These are rows [n k, h]; or,
        without gradient and with grouped experts, the bytes and scales that the first layer would quantize, in n k or `rows` rows. WGrad
        quantizes over 128 tokens of an expert from several ranks, so BF16 is sent if there is a gradient."""
        packs = not torch.is_grad_enabled() and self.runs_grouped
        assert packs or rows is None
        return self._layers[0].backend.pack(x, order, rows) if packs else scatter_tokens(x, order)

    @property
    def _layers(self) -> tuple[GroupedLinear, GroupedLinear]:
        if self._grouped is None:
            first, second = self._list_layers()
            self._grouped = GroupedLinear(first), GroupedLinear(second)
        return self._grouped


def _run_expert(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Return an expert's outputs. Its bias is added to the rounded product, and no rank holds a part of such an expert."""
    y = batch_invariant.apply_with_min_rows(lambda rows: mlp(rows)[0], x)
    return y if mlp.linear_fc2.bias is None else y + take_weight(mlp.linear_fc2.bias)


def free_frozen_operands(model: ModelChunks) -> None:
    """Free the operands of frozen blocks, which no optimizer step replaces. The next pass recreates them."""
    for layer in list_quantized_layers(model):
        if not layer.weight.requires_grad:
            layer.cached_operand = None
    for *_, experts in iter_modules(model, OutputWeightedExperts):
        for linear in experts._grouped or ():
            if not any(layer.weight.requires_grad for layer in linear.layers):
                linear.free_operand()


class _Weigh(torch.autograd.Function):
    """`weigh` with gradient; keeps y."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, weights)
        return weigh(y, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = ctx.saved_tensors
        of_weights = gradient.to(torch.float32, copy=True).mul_(y).sum(-1)
        return weigh(gradient, weights), of_weights


class _TreeSum(torch.autograd.Function):
    """Adds the partial sums of an expert's ranks, float32 [T, n]. The gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Any, dtype: torch.dtype) -> torch.Tensor:
        return tree.reduce(partial, group, dtype) if len(partial) else partial.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.float(), None, None


class _WeightedSum(torch.autograd.Function):
    """Adds the partial sums of an expert's ranks, float32 [T, h], and the adapters' output [T, h], then multiplies by the weights. Each
    rank computes a part of the tokens and leaves zeros elsewhere; Megatron's following sum over the ranks adds one output and zeros. The
    gradient is whole on every rank."""

    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, weights: torch.Tensor, group: Any, dtype: torch.dtype, added: torch.Tensor | None
    ) -> torch.Tensor:
        ranks, count = group.size(), len(partial)
        y = tree.reduce_scatter(F.pad(partial, (0, 0, 0, -count % ranks)), group, dtype) if count else partial.to(dtype)
        start = min(group.rank() * len(y), count)
        ctx.rows = slice(start, min(start + len(y), count))
        y = y[: ctx.rows.stop - start]
        y = y if added is None else y + added[ctx.rows]
        ctx.save_for_backward(y, weights)
        result = torch.zeros_like(partial, dtype=dtype)
        result[ctx.rows] = weigh(y, weights[ctx.rows])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        of_weights = torch.zeros_like(weights)
        of_weights[ctx.rows] = (gradient[ctx.rows].float() * y.float()).sum(-1).to(weights.dtype)
        of_outputs = weigh(gradient, weights)
        return of_outputs, of_weights, None, None, of_outputs if ctx.needs_input_grad[4] else None


class MixtureOfExperts(MoELayer):
    """Megatron's layer with a `TreeDispatcher` or, if `config.sums_by_tree` is False, an `EvenDispatcher` (GPU) or `Dispatcher` (CPU)."""

    def __init__(self, config: TransformerConfig, *, pg_collection: Any, **options: Any) -> None:
        super().__init__(config, pg_collection=pg_collection, **options)
        dispatcher = TreeDispatcher if config.sums_by_tree else EvenDispatcher if token_counts.counts_on_device() else Dispatcher
        self.token_dispatcher = dispatcher(self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection)
        for each in self._dispatchers:
            each.router, each.experts = self.router, self.experts

    @property
    def token_dispatcher(self) -> Any:
        """The dispatcher of the micro-batch whose turn it is; it holds that micro-batch's token counts."""
        return self._dispatchers[two_batch.get_turn()]

    @token_dispatcher.setter
    def token_dispatcher(self, dispatcher: Any) -> None:
        self._dispatchers = [dispatcher, copy.copy(dispatcher)]

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output and drop the dispatcher's references, which would keep the activations of a recomputed layer alive."""
        result = super().postprocess(output, shared_expert_output)
        for name in ("probs", "routing_map", "reversed_local_input_permutation_mapping", "order"):
            setattr(self.token_dispatcher, name, None)
        return result


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher. The other micro-batch computes during communication. The host waits once, for all token counts, or
    never if routers replay (`token_counts`) or parts have a fixed size (`forecast`)."""

    router: Router
    experts: OutputWeightedExperts
    tokens_per_expert: Any

    def preprocess(self, routing_map: torch.Tensor) -> Any:
        """Start to count the tokens sent to each expert; `token_dispatch` waits for the counts."""
        self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
        known = self.router.router_replay.find_counts()
        self._find_counts = (lambda: known) if isinstance(known, LayerCounts) else self._count(routing_map.sum(0), known)

    def _count(self, own: torch.Tensor, _: LayerForecast | None) -> Callable[[], Any]:
        """Start to count, from the tokens [experts] that this rank sends; return a function whose result is for `_set_counts`."""
        return start_count(own)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Replace Megatron's copy of its counts to the host: `_find_counts` returns them there."""
        return tokens_per_expert

    def _set_counts(self, counts: LayerCounts) -> None:
        by_rank = counts.received.sum(-1)
        self.input_splits, self.output_splits = counts.sent.tolist(), by_rank[:, self.tp_rank].tolist()
        self.output_splits_tp = by_rank.sum(0)
        self.num_global_tokens_per_local_expert = counts.received.transpose(0, 1).flatten(0, 1)
        self.tokens_per_expert = counts.received.sum((0, 1))

    def token_dispatch(self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor) -> Any:
        """Send tokens [n, h] and their weights [n] to the ranks of their experts."""
        self._set_counts(self._find_counts())
        tensors = permutated_local_input_tokens, permuted_probs
        return tensors if self.ep_size == 1 else exchange_rows(tensors, self.input_splits, self.output_splits, self.ep_group)

    def token_combine(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        """Send outputs [n, h] back to the ranks of their tokens."""
        if self.ep_size == 1:
            return hidden_states
        return exchange_rows([hidden_states], self.output_splits, self.input_splits, self.ep_group)[0]


class TreeDispatcher(Dispatcher):
    """Adds a token's outputs in tree order over experts."""

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h] of the weighted outputs [n, h] of this rank's tokens, sorted by expert, then by token."""
        outputs = permutated_local_input_tokens
        experts, tokens = self.routing_map.t().nonzero(as_tuple=True)
        num_tokens, num_experts = self.routing_map.shape
        return sum_experts(outputs, tokens, experts, num_tokens, num_experts, outputs.dtype).view(self.hidden_shape)


@dataclass(frozen=True)
class _Parts:
    """Parts of a fixed size that a rank exchanges. The host does not know how many of their rows are tokens."""

    own: torch.Tensor  # int64 [experts], on the device: tokens that this rank sends to each expert
    received: torch.Tensor  # int64 [ep, own experts], on the device: tokens from each rank for each expert of this rank
    forecast: LayerForecast
    sizes: list[int]


class EvenDispatcher(Dispatcher):
    """Dispatcher for a fixed number of experts per token. Megatron's own asks the device twice how many tokens were selected. A token's
    outputs are summed in FP32 and rounded once in a fixed order (`kernels.experts.reference`), as in SGLang, and so is the gradient of its
    input. Megatron adds them in the tensor's dtype in any order."""

    order: torch.Tensor  # order of tokens as in `kernels.experts.reference`
    as_received: bool  # whether experts get tokens in the order in which ranks sent them
    parts: _Parts | None  # None if tokens are counted

    def preprocess(self, routing_map: torch.Tensor) -> Any:
        """Start to count the tokens sent to each expert, or find the parts that are large enough for them."""
        self.as_received, self.parts = self.num_local_experts > 1 and self.tp_size == 1 and self.experts.runs_grouped, None
        super().preprocess(routing_map)

    def _count(self, own: torch.Tensor, forecast: LayerForecast | None) -> Callable[[], Any]:
        if forecast is None or not self.as_received:
            return start_count(own)
        if forecast.sizes is None:
            forecast.note(own, self.num_out_tokens)
            return start_count(own)
        by_rank = gather_counts(own).view(self.ep_size, self.ep_size, -1)  # [ranks, ep, own experts]
        received = by_rank[:, parallel_state.get_expert_model_parallel_rank()].contiguous()
        self.parts = parts = _Parts(own, received, forecast, forecast.sizes)
        return lambda: parts

    def _set_counts(self, counts: LayerCounts | _Parts) -> None:
        if isinstance(counts, LayerCounts):
            return super()._set_counts(counts)
        self.input_splits = counts.sizes
        self.output_splits = [counts.sizes[parallel_state.get_expert_model_parallel_rank()]] * self.ep_size

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's tokens [n k, h] (maybe packed), sorted by expert, then by token, and their weights [n k]; in parts with
        gaps if there are such."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        rows = hidden_states.view(-1, self.hidden_shape[-1])
        self.preprocess(routing_map)
        self.hidden_shape_before_permute = rows.shape
        chosen = routing_map.t().reshape(-1).nonzero_static(size=len(rows) * self.config.moe_router_topk).squeeze(1)
        order, weights, parts = (chosen % len(rows)).argsort(stable=True), probs.t().reshape(-1), self.parts
        if parts is None:
            self.order = order.view(len(rows), -1)
            return self.experts.scatter_tokens(rows, self.order), weights.index_select(0, chosen)
        total, forecast = sum(parts.sizes), parts.forecast
        places, sent = place_tokens(chosen, weights, parts.own, forecast.on_device, forecast.noted, total)
        self.order = places[order].view(len(rows), -1)
        return self.experts.scatter_tokens(rows, self.order, total), sent

    def dispatch_postprocess(self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor) -> tuple[Any, ...]:
        """Return (tokens, tokens per expert, weights), sorted by expert. Grouped experts get tokens as received with their groups; they are
        sorted when they are spread to the experts."""
        if not self.as_received:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        if self.parts is not None:
            groups = group_parts(self.parts.received, len(global_probs) // self.ep_size)
        else:
            groups = TokenGroups.from_counts(self.num_global_tokens_per_local_expert, global_probs.device)
        return global_input_tokens, groups, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs in the order in which tokens were received."""
        return hidden_states if self.as_received else super().combine_preprocess(hidden_states)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h] of the weighted outputs [n k, h] of this rank's tokens, in the order of `dispatch_preprocess`."""
        return sum_tokens(permutated_local_input_tokens, self.order).view(self.hidden_shape)
