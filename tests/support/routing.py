"""Routing of experts: statistics, replay and balancing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.errors import RunError
from megatron_rl.mcore import model as models
from megatron_rl.mcore.layers.moe.experts import Dispatcher
from megatron_rl.mcore.layers.moe.router import ModelRouters, Router
from megatron_rl.rollout.worker import RolloutBatch
from parallel.layout import Layout
from support.models import FP8, FP32
from support.trainer import Trainer, gather, negative_log_likelihood, own
from support.training_runs import ScriptedWorker, run_loop

TRAIN = {"micro_batch_tokens": 60, "adam_eps": 1e-4}


def scores(
    folder: Path,
    batch: list[TrainingSample],
    layout: Layout | None,
    train: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return log-probs, metrics and records of routers that follow a batch's records and of free ones, and metrics and weights of one
    step. `options` are additional options of Megatron."""
    with mock.patch.object(models, "QuantizedTransformerConfig", functools.partial(models.QuantizedTransformerConfig, **(options or {}))):
        trainer = Trainer(folder, FP32, {**TRAIN, **(train or {})}, layout=layout)
    routing, results = trainer.actor.routing, {}
    share = own(batch)
    with routing.collect_stats(share, keep=True) as watch:
        results["logprobs"] = torch.cat(gather(share, trainer.actor.compute_logprobs(share)[0]))
    results |= {"metrics": watch.gather_metrics(), "records": gather(share, watch.gather_records())}
    with routing.disable_replay(), routing.collect_stats(share, keep=True) as watch:
        results["free"] = torch.cat(gather(share, trainer.actor.compute_logprobs(share)[0]))
    results |= {"free_metrics": watch.gather_metrics(), "free_records": gather(share, watch.gather_records())}
    results["step"] = trainer.actor.update(share, negative_log_likelihood)
    return results | {"masters": trainer.collect_tensors(fp8=False)}


def own_routing(folder: Path, batch: list[TrainingSample]) -> dict[str, Any]:
    """Take a step on a batch as it is, and from the same start a step with the records of its own routing."""
    plain = scores(folder, batch, None)
    routed = [replace(sequence, routed_experts=record) for sequence, record in zip(batch, plain["records"], strict=True)]
    return {"plain": plain, "replayed": scores(folder, routed, None)}


def balance(folder: Path, batch: list[TrainingSample], train: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """Take steps whose only loss is the balancing. Return the routers' metrics before each."""
    trainer, metrics = Trainer(folder, FP32, {"micro_batch_tokens": 60, **train}), []
    for _ in range(steps):
        with trainer.actor.routing.collect_stats(batch) as watch:
            trainer.actor.compute_logprobs(batch)
        metrics.append(watch.gather_metrics())
        trainer.actor.update(own(batch), _nothing)
    return metrics


def balance_gradient(folder: Path, batch: list[TrainingSample], weight: float) -> dict[str, torch.Tensor]:
    """Return the gradient of the last layer's router under the load-balancing loss alone, and the same gradient from the formula."""
    trainer = Trainer(folder, FP32, {"micro_batch_tokens": 60, "router_aux_loss": weight, "clip_grad": 0.0, "learning_rate": 1e-9})
    router = [module for module in trainer.model.modules() if isinstance(module, Router)][-1]
    seen: list[torch.Tensor] = []
    hook = router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().flatten(0, 1)))
    trainer.actor.update(own(batch), _nothing)
    hook.remove()
    gradient = router.weight.main_grad.clone()  # type: ignore[union-attr]
    matrix = router.weight.detach().clone().requires_grad_()
    micro_batches, total = trainer.actor.make_micro_batches(batch), sum(sequence.length - 1 for sequence in batch)
    for x, micro_batch in zip(seen, micro_batches, strict=True):
        real = x[: len(x) - micro_batch.padding]
        probabilities = (real @ matrix.t()).softmax(-1)
        chosen = probabilities.topk(router.topk).indices.flatten().bincount(minlength=len(matrix)) / (len(real) * router.topk)
        loss = weight * len(matrix) * (chosen * probabilities.mean(0)).sum()
        (loss * len(real) / total).backward()
    return {"gradient": gradient, "formula": matrix.grad}


def break_a_step(folder: Path, batch: list[TrainingSample]) -> tuple[str, float]:
    """Take a step that would move the correction biases, but has a NaN loss. Return the error and the largest change of a bias."""
    trainer = Trainer(folder, FP32, {**TRAIN, "router_bias_rate": 0.01})
    routers = [module for module in trainer.model.modules() if isinstance(module, Router)]
    before = [router.expert_bias.clone() for router in routers]
    try:
        trainer.actor.update(own(batch), lambda logprobs, batch: (float("nan") * (logprobs * batch.mask).sum(), {}))
    except RunError as error:
        moved = max(float((router.expert_bias - bias).abs().max()) for router, bias in zip(routers, before, strict=True))
        return str(error), moved
    raise AssertionError("the step was taken")


class RoutedWorker(ScriptedWorker):
    """A scripted worker with an engine's routing: the trainer's own, except that the first token of every sequence goes to the next
    experts."""

    def collect(self, version: int) -> RolloutBatch:
        rollout, sequences, routing = super().collect(version), self.sequences(), self.actor.routing
        with routing.disable_replay(), routing.collect_stats(sequences, keep=True) as watch:
            self.actor.compute_logprobs(sequences)
        for completion, record in zip(rollout.completions_B, watch.gather_records(), strict=True):
            record[0] = (record[0] + 1) % routing.shape.num_experts
            completion.routed_experts_T = record.numpy()
        return rollout


def loop(folder: Path, replay: str) -> list[dict[str, float]]:
    """Return the log of two steps in unified FP8 with a KL term, the second with an attribution."""
    algorithm = {"routing_replay": replay, "updates_per_step": 2, "kl_coef": 0.001}
    return run_loop(folder, FP8, algorithm, steps=2, noise=0.0, attribute_every=2, worker_class=RoutedWorker)["rows"]


def _nothing(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return 0.0 * (logprobs * batch.mask).sum(), {}


def with_random_routing(batch: list[TrainingSample], experts: int, top_k: int, layers: int = 2) -> list[TrainingSample]:
    """Return the batch with random routing."""
    generator = torch.Generator().manual_seed(3)

    def record(tokens: int) -> torch.Tensor:
        return torch.rand(tokens - 1, layers, experts, generator=generator).topk(top_k).indices.byte()

    return [replace(sequence, routed_experts=record(sequence.length)) for sequence in batch]


def train_on_records(run: Callable[..., dict[str, Any]], known: bool, *args: Any) -> dict[str, Any]:
    """Return the results of `run`, and the number of layer passes that counted tokens themselves (`free`). With `known`, replaying
    routers know the counts ahead, and the counts must be Megatron's."""
    plain, free = MoEAlltoAllTokenDispatcher.preprocess, 0
    names = ["input_splits", "output_splits", "output_splits_tp", "num_out_tokens"]

    def preprocess(self: Any, routing_map: torch.Tensor) -> None:
        nonlocal free
        free += self.router.router_replay.find_counts() is None
        counts, of_several = plain(self, routing_map), ["num_global_tokens_per_local_expert"] if self.num_local_experts > 1 else []
        self.wanted = {"tokens_per_expert": counts} | {name: getattr(self, name) for name in names + of_several}
        of_layer(self, routing_map)

    def token_dispatch(self: Any, *tensors: torch.Tensor) -> Any:
        result = dispatch(self, *tensors)
        for name, wanted in self.wanted.items() if self.ep_size * self.tp_size > 1 else ():
            assert torch.equal(torch.as_tensor(getattr(self, name)), torch.as_tensor(wanted)), name
        return result

    of_layer, dispatch = Dispatcher.preprocess, Dispatcher.token_dispatch
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Dispatcher, "preprocess", preprocess))
        patches.enter_context(mock.patch.object(Dispatcher, "token_dispatch", token_dispatch))
        if not known:
            patches.enter_context(mock.patch.object(ModelRouters, "count_ahead", lambda _, batches: [{}] * len(batches)))
        return {"results": run(*args), "free": free}
