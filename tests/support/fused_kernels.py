"""A trainer with and without one of its GPU paths, run on a CPU. References and `fake_gpu_libraries` stand in for kernels and libraries."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.experts.deep_gemm import view_as_one
from megatron_rl.kernels.experts.reference import scatter_tokens
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.rope import reference as rope
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore import actor
from megatron_rl.mcore.layers import norms, spec
from megatron_rl.mcore.layers.attention import mla, self_attention
from megatron_rl.mcore.layers.moe import experts
from megatron_rl.mcore.passes.activation_hooks import record_activations
from megatron_rl.mcore.precision_graph import read_rank_graph
from parallel.layout import Layout
from support import fake_gpu_libraries
from support.trainer import STILL, Trainer, latent_attention, own

TRAIN = STILL | {"micro_batch_tokens": 1000}
DEEP_GEMM = {"mode": "fp8_unified", "backend": "deep_gemm", "reduction": "fast"}


def with_and_without(run: Callable[..., dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
    """Return what `run` returns with the path, and without it."""
    return [run(*args, way) for way in (True, False)]


@contextmanager
def stand_ins() -> Iterator[pytest.MonkeyPatch]:
    make_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        yield patch
    make_backend.cache_clear()


def record(trainer: Trainer, batch: list[TrainingSample], ending: str) -> dict[str, int]:
    """Return the widths of recorded activations whose names end so."""
    with record_activations(trainer.model) as seen:
        trainer.actor.compute_logprobs(batch[:1])
    return {name: tensor.shape[-1] for name, tensor in seen.items() if name.endswith(ending)}


def quantize_swiglu(folder: Path, batch: list[TrainingSample], precision: dict[str, Any], recompute: str, fused: bool) -> dict[str, Any]:
    """SwiGLU quantized as it is computed: log-probs, gradients, calls of SwiGLU as a separate operator, recorded results."""
    calls = mock.Mock(side_effect=swiglu.swiglu)
    with stand_ins() as patch:
        patch.setattr(swiglu, "is_fused", lambda: True)
        patch.setattr(spec.swiglu, "swiglu", calls)
        if not fused:
            patch.setattr(spec, "can_fuse_swiglu", lambda *_: False)
        trainer = Trainer(folder, precision, TRAIN | {"recompute": recompute})
        result = trainer.differentiate(batch) | {"operators": calls.call_count}
        return result | {"recorded": record(trainer, batch, "swiglu")}


def quantize_norms(folder: Path, batch: list[TrainingSample], precision: dict[str, Any], recompute: str, fused: bool) -> dict[str, Any]:
    """Norms quantized as they are computed: log-probs, gradients, whether each call added a residual, recorded results, and how often
    log-probs quantized columns, which only WGrad needs (`in_vain`)."""
    with stand_ins() as patch:
        patch.setattr(norms, "is_fused", lambda _: fused)
        patch.setattr(actor, "count_row_multiple", lambda config, *_: 128 * config.tensor_model_parallel_size)
        kernels = []
        for module, name in (("norm.triton", "quantize_norm"), ("quantize.triton", "quantize_activation")):
            library: Any = sys.modules[f"megatron_rl.kernels.{module}"]
            kernels.append(mock.Mock(side_effect=getattr(library, name)))
            patch.setattr(library, name, kernels[-1])
        trainer = Trainer(folder, precision, TRAIN | {"recompute": recompute})
        seen: dict[str, Any] = {}

        def read_calls() -> None:
            seen["in_vain"] = sum(call.kwargs["columns"] for kernel in kernels for call in kernel.call_args_list)
            seen["calls"] = [call.args[1] is not None for call in kernels[0].call_args_list]

        return trainer.differentiate(batch, read_calls) | seen | {"recorded": record(trainer, batch, "norm")}


def rotate_heads(folder: Path, batch: list[TrainingSample], fused: bool) -> dict[str, Any]:
    """Queries and keys made in one pass: log-probs, gradients, and the number of such passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "rotates_rows", lambda _: True)
        patch.setattr(self_attention, "can_rotate", lambda *_: fused)
        patch.setattr(self_attention, "split_heads", split := mock.Mock(side_effect=self_attention.split_heads))
        return Trainer(folder, {"mode": "bf16"}, TRAIN).differentiate(batch) | {"calls": split.call_count}


def absorb_latents(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], layout: Layout, absorbed: bool) -> dict[str, Any]:
    """Latent attention in the absorbed form, or in the expanded one: log-probs and this rank's gradients."""
    with latent_attention(absorbed):
        return Trainer(folder, precision, STILL, layout=layout).differentiate(batch)


def run_gpu_operators(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], ours: bool) -> dict[str, Any]:
    """Rotary positions and SwiGLU by this project's operators for a GPU, or by Megatron's, whose rotation of packed rows waits for the
    device: log-probs and gradients in the expanded form of latent attention."""
    with latent_attention(absorbed=False), pytest.MonkeyPatch.context() as patch:
        if ours:
            for module in (rope, mla):
                patch.setattr(module, "rotates_rows", lambda *_: True)
            patch.setattr(swiglu, "is_fused", lambda: True)
            patch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", mock.Mock(side_effect=AssertionError("waits for the device")))
        trainer = Trainer(folder, precision, STILL)
        assert any(isinstance(module, spec.SwiGLU) for module in trainer.model.modules()) == ours
        return trainer.differentiate(batch)


def group_experts(folder: Path, batch: list[TrainingSample], recompute: str, grouped: bool) -> dict[str, Any]:
    """Experts in grouped products: log-probs before and after an update, its gradients, its calls of DeepGEMM, and the graph's words."""
    calls: Counter[str] = Counter()
    with stand_ins() as patch:
        patch.setattr(swiglu, "is_fused", lambda: True)
        for name in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous"):
            function = getattr(fake_gpu_libraries, name)
            patch.setattr(
                sys.modules["deep_gemm"], name, lambda *a, name=name, function=function, **k: (calls.update([name]), function(*a, **k))[1]
            )
        if not grouped:
            patch.setattr(experts, "can_group", lambda layers: False)
        trainer = Trainer(folder, DEEP_GEMM, TRAIN | {"learning_rate": 1e-2, "recompute": recompute})
        result = trainer.differentiate(batch, calls.clear) | {"calls": dict(calls)}
        layers = [module for module in trainer.model.modules() if isinstance(module, experts.OutputWeightedExperts)]
        buffers = [[layer.weight.main_grad for layer in each] for module in layers for each in module._list_layers()]
        return result | {
            "after": torch.cat(trainer.actor.compute_logprobs(batch)[0]),
            "details": {node.detail for node in read_rank_graph(trainer.model).nodes if ".experts." in node.name},
            "in_place": [view_as_one(each) is not None for each in buffers],
        }


def dispatch_packed(folder: Path, batch: list[TrainingSample], layout: Layout, packed: bool) -> dict[str, Any]:
    """Ranks that exchange tokens as on a GPU, packed as bytes and scales, or in BF16: log-probs before and after an update, and the bytes
    by dtype that a log-prob pass (`scored`) and an update (`updated`) exchange."""
    sent: Counter[str] = Counter()
    exchange = dist.all_to_all_single

    def count(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent[str(input.dtype).removeprefix("torch.")] += input.numel() * input.itemsize
        return exchange(output, input, *args, **options)

    def take_sent() -> None:
        result["scored"] = dict(sent)
        sent.clear()

    result: dict[str, Any] = {}
    with stand_ins() as patch:
        patch.setattr(experts, "counts_on_device", lambda: True)
        patch.setattr(dist, "all_to_all_single", count)
        if not packed:
            patch.setattr(experts.OutputWeightedExperts, "scatter_tokens", lambda _, rows, order: scatter_tokens(rows, order))
        trainer = Trainer(folder, DEEP_GEMM, TRAIN | {"learning_rate": 1e-2}, layout=layout)
        result |= trainer.differentiate(batch, take_sent) | {"updated": dict(sent)}
        return result | {"after": torch.cat(trainer.actor.compute_logprobs(own(batch))[0])}
