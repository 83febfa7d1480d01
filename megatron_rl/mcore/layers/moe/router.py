"""MoE routers with statistics and routing replay, which makes them use recorded experts (docs/guides/moe.md).

Megatron's routers ask an object `router_replay` for their experts. Megatron's own class shares its state among all models of a process,
so actor and reference would replay together; here each router has its own `RoutingReplay`. A training step with recomputation:

    forward A     forward_batch = A; A is queued afterwards
    forward B     forward_batch = B; B is queued afterwards
    backward A    recomputes A's forward pass: without a forward_batch, the router takes A from the queue
    backward B    likewise B
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter

from megatron_rl.batch.micro_batch import MicroBatches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.kernels.batch_invariant import InvariantRouting
from megatron_rl.kernels.device_copy import copy_to_device
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.mcore.base.names import iter_modules, override
from megatron_rl.mcore.base.two_batch import PerMicroBatch
from megatron_rl.mcore.base.weight_gradient import take_weights
from megatron_rl.mcore.layers.moe import token_counts
from megatron_rl.mcore.layers.moe.forecast import Forecast, LayerForecast
from megatron_rl.mcore.layers.moe.token_counts import UNKNOWN, KnownRoutes, LayerCounts, count_ahead
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.metrics import declare

T = TypeVar("T")
_LOAD, _ENTROPY = "most / mean", "router entropy (nats per token)"
_LAYER_LOAD = declare("router/load/layer_{}", "largest load of an expert over the mean, layer {}")
_LOAD_MEAN, _LOAD_MAX, _ENTROPY_MEAN, _ENTROPY_MIN, _DROPPED, DIFFERS = (
    declare("router/load_mean", "largest load of an expert over the mean, mean over layers", "number", _LOAD, label="mean over layers"),
    declare("router/load_max", "largest load of an expert over the mean, maximum over layers", "number", _LOAD, label="maximum"),
    declare("router/entropy", "entropy of the routers per token, mean over layers", "nats", _ENTROPY, label="mean over layers"),
    declare("router/entropy_min", "entropy of the routers per token, minimum over layers", "nats", _ENTROPY, label="minimum"),
    declare("router/dropped", "expert choices that no expert received", "count", "choices dropped"),
    declare("router/differs", "share of tokens routed differently by trainer and engine, mean over layers", "share",
            "tokens sent elsewhere", label="under replay"),
)  # fmt: skip


class Router(TopKRouter):
    """Megatron's router with a `RoutingReplay` and with load balancing that counts only tokens of samples, however ranks share them."""

    aux_loss_coeff = 0.0  # in place of the config's

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.router_replay = RoutingReplay(self)

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.router_replay.begin()
        with InvariantRouting(), take_weights(self):
            return super().forward(input, padding_mask if batch is None else batch.padding)

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        return self.aux_loss_coeff if aux_loss_type == "aux_loss" else 0.0

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, aux_loss_coeff: float, aux_loss: torch.Tensor, aux_loss_name: str, reduce_group: Any, **_: Any
    ) -> torch.Tensor:
        """Attach each rank's part of the loss, times the number of the micro-batch's tokens. Megatron's `valid_token_count` is
        inconsistent: this rank's tokens without a mask, those of all tensor-parallel ranks with one."""
        batch = self.router_replay.current
        if batch is not None and batch.empty:
            return activation  # without tokens the loss is NaN
        tokens = activation.new_full((), activation.shape[0], dtype=torch.float32) if batch is None else (~batch.padding).sum().float()
        if reduce_group.size() > 1:
            dist.all_reduce(tokens, group=reduce_group)
        return MoEAuxLossAutoScaler.apply(activation, aux_loss * tokens)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask.unsqueeze(-1))

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """Return a distribution over experts [t, experts] from scores: logits, a softmax, or sigmoids with a bias."""
        if self.score_function == "softmax":
            return scores if self.config.moe_router_pre_softmax else scores.softmax(-1)
        unbiased = scores if self.expert_bias is None else scores - self.expert_bias
        return unbiased / unbiased.sum(-1, keepdim=True)


@dataclass(frozen=True)
class RoutedMicroBatch:
    """This rank's t tokens of a micro-batch, as routers see them."""

    token_indices: torch.Tensor  # int64 [t]: index of the position among the positions of all the replica's samples; -1 for padding
    padding: torch.Tensor  # bool [t]
    empty: bool  # whether the micro-batch holds no tokens of samples on any rank that shares it
    routed_experts: torch.Tensor | None  # recorded experts [t, layers, k], or None if the samples have none
    replay: bool  # whether the routers use the recorded experts
    stats: RoutingStats | None
    known: KnownRoutes  # token counts of the layers in which they are known or expected
    record: dict[int, torch.Tensor] = field(default_factory=dict)  # chosen experts [t, k] by layer, if `RoutingStats` keeps them


class RoutingReplay:
    """Chooses the experts of one router; Megatron calls `get_replay_topk`."""

    forward_batch = PerMicroBatch()  # the `RoutedMicroBatch` of the current forward pass

    def __init__(self, router: Router) -> None:
        self.router = router
        self.recompute_queue: deque[RoutedMicroBatch] = deque()  # micro-batches that backward passes will recompute, in order
        self.current: RoutedMicroBatch | None = None

    def begin(self) -> RoutedMicroBatch | None:
        """Start the router's next pass; return its micro-batch: of the current forward pass, else of the next recomputation."""
        self.current = self.recompute_queue.popleft() if self.forward_batch is None and self.recompute_queue else self.forward_batch
        return self.current

    def find_counts(self) -> LayerCounts | LayerForecast | None:
        """Return the token counts of the current pass, or what is expected, or None if they are unknown."""
        return None if self.current is None else self.current.known.get(self.router.layer_number - 1)

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores of the chosen experts, experts), both [t, k], for `scores` [t, experts]."""
        batch, layer = self.current, self.router.layer_number - 1

        @torch.enable_grad()  # Megatron sorts the chosen experts only with gradient, and their order decides the bits of their weights
        def choose() -> tuple[torch.Tensor, torch.Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        if batch is None:
            return choose()
        recorded = None if batch.routed_experts is None else batch.routed_experts[:, layer].long()
        chosen = (scores.gather(1, recorded), recorded) if batch.replay and recorded is not None else choose()
        if isinstance(self.find_counts(), LayerForecast):  # padding would choose the same experts, which nobody could expect
            evenly = torch.arange(chosen[1].numel(), device=scores.device).view(chosen[1].shape) % scores.shape[1]
            experts = torch.where(batch.padding.unsqueeze(1), evenly, chosen[1])
            chosen = scores.gather(1, experts), experts
        if batch.stats is not None:
            batch.stats.add(layer, batch, self.router.probabilities(scores.detach()), chosen[1])
            if recorded is not None:
                batch.stats.add_comparison(layer, batch, choose()[1], recorded)
        return chosen


class RoutingStats:
    """Statistics of a model's routers over forward passes of all the given samples, once each."""

    def __init__(self, shape: RoutingShape | None, samples: list[TrainingSample], device: torch.device, keep: bool) -> None:
        self._shape, self._replayable = shape, float(any(len(sample.routed_experts) for sample in samples))
        self._lengths, self._device, self._keeps = [sample.length - 1 for sample in samples], device, keep
        self.reset()

    def reset(self) -> None:
        """Forget all passes, which are repeated."""
        if (shape := self._shape) is None:
            return
        self._loads = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.float64, device=self._device)
        self._sums = torch.zeros(3, shape.num_layers, dtype=torch.float64, device=self._device)  # tokens, their entropy, tokens that differ
        self._arrived = torch.zeros((), dtype=torch.float64, device=self._device)
        self._sent, self._dtype = 0, torch.uint8 if shape.dtype is np.uint8 else torch.int16
        self._records: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        """Layers, token indices [t], and chosen experts [t, layers, k], on the host, of each micro-batch."""

    def add(self, layer: int, batch: RoutedMicroBatch, probabilities: torch.Tensor, chosen: torch.Tensor) -> None:
        """Count a router's tokens: probabilities [t, experts] and chosen experts [t, k]."""
        valid = (~batch.padding).double()  # weighted sums: a selection would wait for the device
        entropy = -(probabilities * probabilities.clamp(min=1e-30).log()).sum(-1)
        self._sent += chosen.numel()
        self._loads[layer].index_add_(0, chosen.flatten(), valid.repeat_interleave(chosen.shape[1]))
        self._sums[0, layer] += valid.sum()
        self._sums[1, layer] += (entropy * valid).sum()
        if self._keeps and self._shape is not None:
            batch.record[layer] = chosen.to(self._dtype)

    def keep_record(self, batch: RoutedMicroBatch) -> None:
        """Start to copy the chosen experts of a micro-batch to the host, which holds the record of all samples."""
        if found := batch.record:
            layers, nothing = slice(min(found), max(found) + 1), torch.zeros_like(found[min(found)])
            chosen = torch.stack([found.get(layer, nothing) for layer in range(layers.start, layers.stop)], 1)
            indices, experts = (x.to("cpu", non_blocking=True) for x in (batch.token_indices, chosen))
            self._records.append((layers, indices, experts))

    def add_arrived(self, experts: SequentialMLP, inputs: tuple[Any, ...], etp: int) -> None:
        """Count the tokens that experts are called with. Each of `etp` tensor-parallel ranks of an expert receives all of its tokens."""
        if isinstance(groups := inputs[1], TokenGroups):
            self._arrived += (groups.sources >= 0).sum()
        else:
            self._arrived += len(inputs[0]) / etp

    def add_comparison(self, layer: int, batch: RoutedMicroBatch, own: torch.Tensor, recorded: torch.Tensor) -> None:
        """Count tokens whose own choice differs from the record, ignoring the order of experts."""
        differs = (own.sort(-1).values != recorded.sort(-1).values).any(-1)
        self._sums[2, layer] += (differs & ~batch.padding).sum()

    def gather_metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks; {} for a dense model. Collective."""
        if self._shape is None:
            return {}
        counts = copy_to_device(torch.tensor([self._sent, self._replayable], dtype=torch.float64), self._device)
        flat = torch.cat([self._loads.flatten(), self._sums.flatten(), counts[:1] - self._arrived, counts[1:]])
        dist.all_reduce(flat)
        parts = flat.cpu().split([self._loads.numel(), self._sums.numel(), 2])
        loads, sums = parts[0].view(self._loads.shape), parts[1].view(self._sums.shape)
        layers = list(self._shape.moe_layers)
        imbalance = [float(loads[layer].max() / loads[layer].mean()) for layer in layers]
        entropy, differs = ((sums[which, layers] / sums[0, layers]).tolist() for which in (1, 2))
        metrics = {_LAYER_LOAD.format(layer): load for layer, load in zip(layers, imbalance, strict=True)}
        metrics |= {_LOAD_MEAN: sum(imbalance) / len(layers), _LOAD_MAX: max(imbalance)}
        metrics |= {_ENTROPY_MEAN: sum(entropy) / len(layers), _ENTROPY_MIN: min(entropy)}
        metrics[_DROPPED] = float(parts[2][0])
        return metrics | ({DIFFERS: sum(differs) / len(layers)} if parts[2][1] else {})

    def gather_records(self) -> list[torch.Tensor]:
        """Return the chosen experts of each sample's tokens, on the CPU of every rank of the replica. Needs `keep`. Collective."""
        assert self._shape is not None and self._keeps
        if self._device.type == "cuda":
            torch.cuda.current_stream().record_event().synchronize()  # for the copies
        shape = sum(self._lengths) + 1, self._shape.num_layers, self._shape.top_k
        records = torch.zeros(shape, dtype=self._dtype)
        for layers, indices, chosen in self._records:
            records[indices, layers] = chosen  # padding (index -1) goes to the last row
        self._records.clear()
        samples = records[:-1].split(self._lengths)
        for record in samples:  # one after the other, since all of them would need much memory of the device
            whole = copy_to_device(record, self._device)
            reduce.sum_replica(whole.view(torch.uint8))  # one rank writes each byte; it is 0 elsewhere
            record.copy_(whole)
        return list(samples)


class ModelRouters:
    """All routers of one model on this rank. `replay_enabled` says whether they use recorded experts."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        config = chunks[0].config
        self._chunks, self.replay_enabled = chunks, False
        self._stats: RoutingStats | None = None
        self._tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._replays = [[module.router_replay for module in chunk.modules() if isinstance(module, Router)] for chunk in chunks]
        self._etp = config.expert_tensor_parallel_size or 1
        self._recomputes = config.recompute_granularity is not None
        self.shape = _routing_shape(config)
        self._forecast: Forecast | None = None  # of passes without gradient, if the device counts tokens
        if self.shape is not None and token_counts.counts_on_device() and not config.sums_by_tree:
            device = next(chunks[0].parameters()).device
            self._forecast = Forecast(config.num_layers, parallel_state.get_expert_model_parallel_world_size(), device)
        self._forecasts = False  # whether the next passes follow the forecast

    @contextmanager
    def bind_micro_batch(
        self, chunk: Any, token_indices: torch.Tensor, experts: torch.Tensor, empty: bool = False, known: KnownRoutes = UNKNOWN
    ) -> Iterator[None]:
        """Context manager: run one forward pass of this chunk (or its wrapper) on this context-parallel rank's part of
        `MicroBatch.token_indices` [1, t] and `routed_experts`. `empty`: the micro-batch holds no sample."""
        if self.shape is None:
            yield
            return
        replays = self._replays[self._chunks.index(getattr(chunk, "module", chunk))]
        own_indices = self._select_own(token_indices)
        recorded = self._select_own(experts) if len(experts) else None
        batch = RoutedMicroBatch(own_indices, own_indices < 0, empty, recorded, self.replay_enabled, self._stats, known)
        ahead = replace(batch, routed_experts=None, replay=False, stats=None, known=UNKNOWN, record={})  # MTP layers have no record
        batches = [ahead if replay.router.is_mtp_layer else batch for replay in replays]
        for replay, own in zip(replays, batches, strict=True):
            replay.forward_batch = own
        try:
            yield
            if self._stats is not None:
                self._stats.keep_record(batch)
        finally:
            for replay, own in zip(replays, batches, strict=True):
                replay.forward_batch = None
                if self._recomputes and torch.is_grad_enabled():
                    replay.recompute_queue.append(own)

    def agree_on_padding(self, samples: list[TrainingSample]) -> torch.Tensor:
        """Return the experts [layers, k] of padding: 0 to k - 1, since padding must go to k different experts, too. Collective. Empty if
        records are not used, or if no replica's samples have any."""
        if self.shape is None or not (self.replay_enabled or self._stats is not None):
            return torch.empty(0)
        if not reduce.max_over_replicas(any(len(sample.routed_experts) for sample in samples)):
            return torch.empty(0)
        experts = torch.from_numpy(np.arange(self.shape.top_k, dtype=self.shape.dtype))
        return experts.repeat(self.shape.num_layers, 1)

    def count_ahead(self, batches: MicroBatches) -> Sequence[KnownRoutes]:
        """Return the token counts of each micro-batch if the routers replay, or the forecast in `follow_forecast`. Collective."""
        shape, layers = self.shape, sorted(router.layer_number - 1 for router in self._list_recorded())
        replays = self.replay_enabled and batches.has_records
        if self._forecasts and self._forecast is not None and shape is not None and not replays:
            ranks = self._tp * parallel_state.get_context_parallel_world_size()
            widest = reduce.max_of_replicas(batches.widths)  # ranks that exchange tokens may belong to several replicas
            return self._forecast.expect(layers, [width // ranks * shape.top_k for width in widest])
        if shape is None or not (layers and replays):
            return [UNKNOWN] * len(batches)

        def pack(number: int) -> torch.Tensor:
            shard = ContextShard.for_this_rank(batches.list_lengths(number))
            return self._select_own(shard.select(batches.pack_records(number, slice(layers[0], layers[-1] + 1))))

        device = next(self._chunks[0].parameters()).device
        return count_ahead(map(pack, range(len(batches))), layers, shape.num_experts, device)

    def follow_forecast(self, run: Callable[[], T]) -> T:
        """Return `run()`, one pass of micro-batches without gradient. Repeat it if it sent more tokens somewhere than expected. Collective
        among all ranks."""
        if self._forecast is None:
            return run()
        with override([self], "_forecasts", True):
            result = run()
            while not self._forecast.conclude():
                if self._stats is not None:
                    self._stats.reset()
                result = run()
        return result

    def _list_recorded(self) -> list[Router]:
        """Return this rank's routers with a record: all but those of MTP layers."""
        return [replay.router for replay in chain(*self._replays) if not replay.router.is_mtp_layer]

    def _select_own(self, row: torch.Tensor) -> torch.Tensor:
        """Return this rank's [t / tp, ...] of [1, t, ...]: sequence-parallel ranks take consecutive equal parts."""
        length = row.shape[1] // self._tp
        start = parallel_state.get_tensor_model_parallel_rank() * length if self._tp > 1 else 0
        return row[0, start : start + length]

    @contextmanager
    def collect_stats(self, samples: list[TrainingSample], keep: bool = False) -> Iterator[RoutingStats]:
        """Context manager that collects routing statistics from the enclosed forward passes, which must cover all of the replica's samples.
        With `keep`, `RoutingStats.gather_records` returns the chosen experts."""
        stats = RoutingStats(self.shape, samples, next(self._chunks[0].parameters()).device, keep)

        with override([self], "_stats", stats), ExitStack() as hooks:
            for *_, module in iter_modules(self._chunks, SequentialMLP):
                hooks.enter_context(module.register_forward_pre_hook(partial(stats.add_arrived, etp=self._etp)))
            yield stats

    def set_aux_loss_coeff(self, coeff: float) -> None:
        """Set the coefficient of the load-balancing loss of all routers."""
        for replay in chain(*self._replays):
            replay.router.aux_loss_coeff = coeff

    @contextmanager
    def restore_biases_on_error(self) -> Iterator[None]:
        """Context manager that restores the correction biases on an error: Megatron updates them with the gradients, before any check."""
        biases = [replay.router.expert_bias for replay in chain(*self._replays) if replay.router.expert_bias is not None]
        saved = [bias.clone() for bias in biases]
        try:
            yield
        except BaseException:
            for bias, value in zip(biases, saved, strict=True):
                bias.copy_(value)
            raise

    def disable_replay(self) -> AbstractContextManager[None]:
        """Return a context manager in which routers ignore recorded experts."""
        return override([self], "replay_enabled", False)


def _routing_shape(config: TransformerConfig) -> RoutingShape | None:
    if not config.num_moe_experts:
        return None
    frequency: Any = config.moe_layer_freq  # one entry per layer
    layers = tuple(layer for layer in range(config.num_layers) if frequency[layer])
    return RoutingShape(config.num_layers, layers, config.num_moe_experts, config.moe_router_topk)
