"""Routers that can be watched, and told which experts to take: routing replay (docs/guides/moe.md).

Megatron's choice of experts asks an object `router_replay`, whose own class shares its state among all models of a process: actor and
reference would replay together. So every router has one of ours, a `RoutingReplay`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import RoutingShape


class Router(TopKRouter):
    """Megatron's, with a `RoutingReplay`, and with load balancing that counts tokens of sequences only, however ranks share them."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = RoutingReplay(self)

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        now = self.router_replay.begin()
        return super().forward(input, padding_mask if now is None else now.padding)

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        reduce_group_has_dp: bool = False,
        valid_token_count: Any = None,
    ) -> torch.Tensor:
        """Each rank's part of the loss, times the micro-batch's tokens of sequences. Megatron's `valid_token_count` are those of this rank
        alone without a mask, those of all tensor-parallel ranks with one (its all-reduce works in place)."""
        now = self.router_replay.current
        tokens = torch.tensor(activation.shape[0] if now is None else int((~now.padding).sum()), dtype=torch.float32).to(activation.device)
        if reduce_group.size() > 1:
            dist.all_reduce(tokens, group=reduce_group)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * tokens) if tokens > 0 else activation  # of no token it is NaN

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask.unsqueeze(-1))

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """A distribution over experts [t, experts] from what the choice is made by: logits, a softmax, or sigmoids with a bias."""
        if self.score_function == "softmax":
            return scores if self.config.moe_router_pre_softmax else scores.softmax(-1)
        plain = scores if self.expert_bias is None else scores - self.expert_bias
        return plain / plain.sum(-1, keepdim=True)


@dataclass(frozen=True)
class RoutedMicroBatch:
    """The micro-batch in hand: this rank's t tokens of it, as routers see them."""

    token_indices: torch.Tensor
    """int64 [t]: which of the places of all sequences; -1 for padding."""
    padding: torch.Tensor
    """bool [t]."""
    routed_experts: torch.Tensor | None
    """The record [t, layers, k], where the sequences have one."""
    replay: bool
    """Whether the routers take it."""
    watch: RoutingStats | None


class RoutingReplay:
    """How one router chooses; Megatron calls `get_replay_topk`."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.forward_batch: RoutedMicroBatch | None = None
        """The micro-batch whose forward pass is under way."""
        self.recompute_queue: deque[RoutedMicroBatch] = deque()
        """Those that a backward pass will compute anew, in its order."""
        self.current: RoutedMicroBatch | None = None

    def begin(self) -> RoutedMicroBatch | None:
        """The router's next pass begins: a forward pass, or one of a backward pass, outside of any."""
        self.current = self.recompute_queue.popleft() if self.forward_batch is None and self.recompute_queue else self.forward_batch
        return self.current

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`scores` [t, experts]; returns those of the chosen experts and the experts, both [t, k]."""
        now, layer = self.current, self.router.layer_number - 1

        def decide() -> tuple[torch.Tensor, torch.Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        if now is None:
            return decide()
        recorded = None if now.routed_experts is None else now.routed_experts[:, layer].long()
        taken = (scores.gather(1, recorded), recorded) if now.replay and recorded is not None else decide()
        if now.watch is not None:
            now.watch.add(layer, now, self.router.probabilities(scores.detach()), taken[1])
            if recorded is not None:
                now.watch.add_comparison(layer, now, decide()[1], recorded)
        return taken


class RoutingStats:
    """What all routers of a model did in forward passes of all these sequences, once each."""

    def __init__(self, shape: RoutingShape | None, sequences: list[TrainingSample], device: torch.device, keep: bool) -> None:
        self._shape, self._recorded = shape, bool(sequences and len(sequences[0].routed_experts))
        self._lengths = [sequence.length - 1 for sequence in sequences]
        if shape is None:
            return
        self._loads = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.float64, device=device)
        self._sums = torch.zeros(3, shape.num_layers, dtype=torch.float64, device=device)  # tokens, their entropy, tokens that differ
        self.sent, self.arrived = 0, 0.0
        dtype = torch.uint8 if shape.dtype is np.uint8 else torch.int16
        self._kept = torch.zeros(sum(self._lengths) if keep else 0, shape.num_layers, shape.top_k, dtype=dtype, device=device)

    def add(self, layer: int, now: RoutedMicroBatch, probabilities: torch.Tensor, chosen: torch.Tensor) -> None:
        """A router's tokens [t, ...] and the experts that they go to."""
        real = ~now.padding
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)[real]
        self.sent += chosen.numel()
        self._loads[layer] += chosen[real].flatten().bincount(minlength=self._loads.shape[1])
        self._sums[0, layer] += real.sum()
        self._sums[1, layer] += entropy.double().sum()
        if len(self._kept):
            self._kept[now.token_indices[real], layer] = chosen[real].to(self._kept.dtype)

    def add_comparison(self, layer: int, now: RoutedMicroBatch, own: torch.Tensor, recorded: torch.Tensor) -> None:
        """What a router would choose, against the record; the order among the chosen does not count."""
        apart = (own.sort(-1).values != recorded.sort(-1).values).any(-1)
        self._sums[2, layer] += (apart & ~now.padding).sum()

    def gather_metrics(self) -> dict[str, float]:
        """Collective, over all ranks; {} for a dense model. `router/load/layer_N` is the most that an expert got over the mean,
        `router/entropy` in nats, `router/dropped` a number of tokens that did not reach an expert, `router/differs` the share of tokens
        whose experts are not those of the record, where there is one: means over layers."""
        if self._shape is None:
            return {}
        counts = torch.tensor([self.sent, self.arrived], dtype=torch.float64, device=self._loads.device)
        flat = torch.cat([self._loads.flatten(), self._sums.flatten(), counts])
        dist.all_reduce(flat)
        parts = flat.cpu().split([self._loads.numel(), self._sums.numel(), 2])
        loads, sums = parts[0].view(self._loads.shape), parts[1].view(self._sums.shape)
        layers = list(self._shape.moe_layers)
        uneven = [float(loads[layer].max() / loads[layer].mean()) for layer in layers]
        entropy, differs = ((sums[which, layers] / sums[0, layers]).tolist() for which in (1, 2))
        found = {f"router/load/layer_{layer}": load for layer, load in zip(layers, uneven, strict=True)}
        found |= {"router/load_mean": sum(uneven) / len(layers), "router/load_max": max(uneven)}
        found |= {"router/entropy": sum(entropy) / len(layers), "router/entropy_min": min(entropy)}
        found["router/dropped"] = float(parts[2][0] - parts[2][1])
        return found | ({"router/differs": sum(differs) / len(layers)} if self._recorded else {})

    def gather_records(self) -> list[torch.Tensor]:
        """Every sequence's record, of the experts that its tokens went to, on the CPU of every rank; collective. Needs `keep`."""
        dist.all_reduce(self._kept.view(torch.uint8))  # every byte is written by one rank, and 0 elsewhere
        return list(self._kept.cpu().split(self._lengths))


class ModelRouters:
    """All routers of one model on this rank; of a dense model there are none. `replay_enabled`: whether they take a record where there is
    one."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        config = chunks[0].config
        self.replay_enabled = False
        self._chunks = chunks
        self._watch: RoutingStats | None = None
        self._tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._choices = [[module.router_replay for module in chunk.modules() if isinstance(module, Router)] for chunk in chunks]
        self._etp = config.expert_tensor_parallel_size or 1
        self._recomputes = config.recompute_granularity is not None
        self.shape = _shape(config)

    @contextmanager
    def bind_micro_batch(self, chunk: Any, token_indices: torch.Tensor, experts: torch.Tensor) -> Iterator[None]:
        """The next forward pass of this chunk, or of one that wraps it, is of these places: `MicroBatch.token_indices` [1, t] and
        `routed_experts`, or a
        context-parallel rank's of them."""
        if self.shape is None:
            yield
            return
        choices = self._choices[self._chunks.index(getattr(chunk, "module", chunk))]
        part = token_indices.shape[1] // self._tp  # sequence parallelism: ranks take equal parts, one after the other
        first = parallel_state.get_tensor_model_parallel_rank() * part if self._tp > 1 else 0
        mine = token_indices[0, first : first + part]
        record = experts[0, first : first + part] if len(experts) else None
        now = RoutedMicroBatch(mine, mine < 0, record, self.replay_enabled, self._watch)
        for choice in choices:
            choice.forward_batch = now
        try:
            yield
        finally:
            for choice in choices:
                choice.forward_batch = None
                if self._recomputes and torch.is_grad_enabled():
                    choice.recompute_queue.append(now)

    @contextmanager
    def collect_stats(self, sequences: list[TrainingSample], keep: bool = False) -> Iterator[RoutingStats]:
        """Watches the forward passes within, which must be of all these sequences. `keep`: for `RoutingStats.gather_records`."""
        watch = RoutingStats(self.shape, sequences, next(self._chunks[0].parameters()).device, keep)
        self._watch = watch

        def arrived(_: Any, given: tuple[Any, ...]) -> None:
            watch.arrived += len(given[0]) / self._etp  # each tensor-parallel rank of an expert gets all of its tokens

        experts = [module for chunk in self._chunks for module in chunk.modules() if isinstance(module, SequentialMLP)]
        hooks = [module.register_forward_pre_hook(arrived) for module in experts]
        try:
            yield watch
        finally:
            self._watch = None
            for hook in hooks:
                hook.remove()

    @contextmanager
    def restore_biases_on_error(self) -> Iterator[None]:
        """Where an error leaves, correction biases are as they were: Megatron moves them with the gradients, before any is checked."""
        routers = [choice.router for choices in self._choices for choice in choices]
        biases = [router.expert_bias for router in routers if router.expert_bias is not None]
        held = [bias.clone() for bias in biases]
        try:
            yield
        except BaseException:
            for bias, value in zip(biases, held, strict=True):
                bias.copy_(value)
            raise

    @contextmanager
    def disable_replay(self) -> Iterator[None]:
        """Within, routers choose by themselves, whatever is recorded."""
        replay_enabled, self.replay_enabled = self.replay_enabled, False
        try:
            yield
        finally:
            self.replay_enabled = replay_enabled


def _shape(config: TransformerConfig) -> RoutingShape | None:
    if not config.num_moe_experts:
        return None
    frequency: Any = config.moe_layer_freq  # one number for each layer
    layers = tuple(layer for layer in range(config.num_layers) if frequency[layer])
    return RoutingShape(config.num_layers, layers, config.num_moe_experts, config.moe_router_topk)
