"""A trainer whose experts run in grouped products, and one after the other; stand-ins play DeepGEMM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.experts.deep_gemm import view_as_one
from megatron_rl.kernels.experts.reference import scatter_tokens
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore.layers.moe import experts
from megatron_rl.mcore.precision_graph import read_rank_graph
from parallel.layout import Layout
from support import fake_gpu_libraries
from support.trainer import Trainer, own

PRECISION = {"mode": "fp8_unified", "backend": "deep_gemm", "reduction": "fast"}


def run(folder: Path, batch: list[TrainingSample], grouped: bool, recompute: str) -> dict[str, Any]:
    """Log-probs before and after an update, its gradients, how often DeepGEMM was called for an update, and the graph's words."""
    calls = dict.fromkeys(("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous"), 0)
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(swiglu, "is_fused", lambda: True)
        for name in calls:
            patch.setattr(sys.modules["deep_gemm"], name, _counted(calls, name))
        if not grouped:
            patch.setattr(experts, "can_group", lambda layers: False)
        trainer = Trainer(folder, PRECISION, {"learning_rate": 1e-2, "clip_grad": 0.0, "recompute": recompute, "micro_batch_tokens": 1000})
        before, _ = trainer.actor.compute_logprobs(batch)
        calls.update(dict.fromkeys(calls, 0))
        trainer.actor.update(own(batch), negative_log_likelihood)
        counted = dict(calls)
        gradients = {name: weight.main_grad.clone() for name, weight in trainer.model.named_parameters()}
        after, _ = trainer.actor.compute_logprobs(batch)
        details = {node.detail for node in read_rank_graph(trainer.model).nodes if ".experts." in node.name}
        layers = [module for module in trainer.model.modules() if isinstance(module, experts.OutputWeightedExperts)]
        buffers = [[layer.weight.main_grad for layer in each] for module in layers for each in module._list_layers()]
        in_place = [view_as_one(each) is not None for each in buffers]
    found = {"before": torch.cat(before), "after": torch.cat(after), "gradients": gradients, "calls": counted, "details": details}
    return found | {"in_place": in_place}


def run_dispatched(folder: Path, batch: list[TrainingSample], packed: bool, layout: Layout) -> dict[str, Any]:
    """Log-probs before and after an update of ranks that exchange tokens as on a GPU, and the bytes by dtype that a log-prob pass
    exchanges, and an update. `packed`: as `OutputWeightedExperts.scatter_tokens` has it, else in BF16."""
    sent: list[tuple[str, int]] = []
    exchange = dist.all_to_all_single

    def count(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append((str(input.dtype).removeprefix("torch."), input.numel() * input.itemsize))
        return exchange(output, input, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(experts, "counts_on_device", lambda: True)
        patch.setattr(dist, "all_to_all_single", count)
        if not packed:
            patch.setattr(experts.OutputWeightedExperts, "scatter_tokens", lambda _, rows, order: scatter_tokens(rows, order))
        trainer = Trainer(folder, PRECISION, {"learning_rate": 1e-2, "clip_grad": 0.0, "micro_batch_tokens": 1000}, layout=layout)
        before, _ = trainer.actor.compute_logprobs(own(batch))
        scored, sent[:] = _add_up(sent), []
        trainer.actor.update(own(batch), negative_log_likelihood)
        updated = _add_up(sent)
        after, _ = trainer.actor.compute_logprobs(own(batch))
    return {"before": torch.cat(before), "after": torch.cat(after), "scored": scored, "updated": updated}


def _add_up(sent: list[tuple[str, int]]) -> dict[str, int]:
    return {dtype: sum(nbytes for other, nbytes in sent if other == dtype) for dtype, _ in sent}


def packed_and_whole(folder: Path, batch: list[TrainingSample], layout: Layout) -> list[dict[str, Any]]:
    return [run_dispatched(folder, batch, packed, layout) for packed in (True, False)]


def _counted(calls: dict[str, int], name: str) -> Any:
    function = getattr(fake_gpu_libraries, name)

    def count(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return function(*args, **options)

    return mock.Mock(side_effect=count)


def grouped_and_one_by_one(folder: Path, batch: list[TrainingSample], recompute: str) -> list[dict[str, Any]]:
    return [run(folder, batch, grouped, recompute) for grouped in (True, False)]
