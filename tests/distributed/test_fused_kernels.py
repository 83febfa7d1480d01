"""The trainer's GPU paths, run on a CPU with stand-ins for the kernels, compute what separate operators compute."""

import sys
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from support import fake_gpu_libraries, trainer
from support.families import QUANTIZED
from support.models import FP8, FP32, random_sequences
from support.trainer import STILL, Trainer, latent_attention, own

from megatron_rl.kernels.experts import deep_gemm
from megatron_rl.kernels.experts.backends import make_grouped_backend
from megatron_rl.kernels.experts.deep_gemm import view_as_one
from megatron_rl.kernels.experts.reference import scatter_tokens
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.rope import reference as rope
from megatron_rl.kernels.swiglu import reference as swiglu
from megatron_rl.mcore import actor
from megatron_rl.mcore.activation_hooks import record_activations
from megatron_rl.mcore.layers import spec
from megatron_rl.mcore.layers.attention import mla, self_attention
from megatron_rl.mcore.layers.linear import norms
from megatron_rl.mcore.layers.moe import experts, token_counts
from megatron_rl.mcore.layers.moe.router import ModelRouters
from megatron_rl.mcore.precision_graph import read_rank_graph
from parallel.layout import Layout

LAYERS, SPARSE, EXPERTS = 2, 1, 8
"""Layers, layers with experts, and experts of each of those."""
BATCH = random_sequences(6, seed=1)
TRAIN = STILL | {"micro_batch_tokens": 1000}
GROUPED = ("m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_tn_contiguous")
DEEP_GEMM = {"mode": "fp8_unified", "backend": "deep_gemm", "reduction": "fast"}


def with_and_without(run, *args):
    """Return what `run` returns with the path, and without it."""
    return [run(*args, way) for way in (True, False)]


@contextmanager
def stand_ins():
    make_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        yield patch
    make_backend.cache_clear()


def record(trainer, batch, ending):
    """Return the widths of recorded activations whose names end so."""
    with record_activations(trainer.actor) as recorder:
        trainer.actor.compute_logprobs(batch[:1])
    recording = recorder.rows.select(torch.zeros(1, dtype=torch.long))
    return {name: int(tensor.sketch.exact[0, 1]) for name, tensor in recording.items() if name.endswith(ending)}


def quantize_swiglu(folder, batch, precision, recompute, fused):
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


def quantize_norms(folder, batch, precision, recompute, fused):
    """Norms quantized as they are computed: log-probs, gradients, whether each call added a residual, recorded results, and how often
    log-probs quantized columns, which only WGrad needs (`in_vain`)."""
    with stand_ins() as patch:
        patch.setattr(norms, "is_fused", lambda _: fused)
        patch.setattr(actor, "count_row_multiple", lambda config, *_: 128 * config.tensor_model_parallel_size)
        kernels = []
        for module, name in (("norm.triton", "quantize_norm"), ("quantize.triton", "quantize_activation")):
            library = sys.modules[f"megatron_rl.kernels.{module}"]
            kernels.append(mock.Mock(side_effect=getattr(library, name)))
            patch.setattr(library, name, kernels[-1])
        trainer = Trainer(folder, precision, TRAIN | {"recompute": recompute})
        seen = {}

        def read_calls():
            seen["in_vain"] = sum(call.kwargs["columns"] for kernel in kernels for call in kernel.call_args_list)
            seen["calls"] = [call.args[1] is not None for call in kernels[0].call_args_list]

        return trainer.differentiate(batch, read_calls) | seen | {"recorded": record(trainer, batch, "norm")}


def rotate_heads(folder, batch, fused):
    """Queries and keys made in one pass: log-probs, gradients, and the number of such passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "rotates_rows", lambda _: True)
        patch.setattr(self_attention, "can_rotate", lambda *_: fused)
        patch.setattr(self_attention, "split_heads", split := mock.Mock(side_effect=self_attention.split_heads))
        return Trainer(folder, {"mode": "bf16"}, TRAIN).differentiate(batch) | {"calls": split.call_count}


def absorb_latents(folder, precision, batch, layout, absorbed):
    """Latent attention in the absorbed form, or in the expanded one: log-probs and this rank's gradients."""
    with latent_attention(absorbed):
        return Trainer(folder, precision, STILL, layout=layout).differentiate(batch)


def run_gpu_operators(folder, precision, batch, ours):
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


def group_experts(folder, batch, recompute, grouped, blackwell=False):
    """Experts in grouped products: log-probs before and after an update, its gradients, its calls of DeepGEMM, and the graph's words."""
    calls = Counter()
    make_grouped_backend.cache_clear()
    with stand_ins() as patch:
        patch.setattr(deep_gemm, "is_blackwell", lambda: blackwell)
        patch.setattr(swiglu, "is_fused", lambda: True)
        for name in ("fp8_gemm_nt", *GROUPED):
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


def dispatch_packed(folder, batch, layout, packed):
    """Ranks that exchange tokens as on a GPU, packed as bytes and scales, or in BF16: log-probs before and after an update, and the bytes
    by dtype that a log-prob pass (`scored`) and an update (`updated`) exchange."""
    sent = Counter()
    exchange = dist.all_to_all_single

    def count(output, input, *args, **options):
        sent[str(input.dtype).removeprefix("torch.")] += input.numel() * input.itemsize
        return exchange(output, input, *args, **options)

    def take_sent():
        result["scored"] = dict(sent)
        sent.clear()

    result = {}
    with stand_ins() as patch:
        patch.setattr(token_counts, "counts_on_device", lambda: True)
        patch.setattr(dist, "all_to_all_single", count)
        patch.setattr(ModelRouters, "follow_forecast", lambda _, run: run())  # parts are always packed
        if not packed:
            patch.setattr(experts.OutputWeightedExperts, "scatter_tokens", lambda _, rows, order: scatter_tokens(rows, order))
        trainer = Trainer(folder, DEEP_GEMM, TRAIN | {"learning_rate": 1e-2}, layout=layout)
        result |= trainer.differentiate(batch, take_sent) | {"updated": dict(sent)}
        return result | {"after": torch.cat(trainer.actor.compute_logprobs(own(batch))[0])}


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


def assert_alike(result, expected, logprobs, gradients):
    """Assert that log-probs, absolutely, and each gradient, relatively, are as near as the bounds say."""
    assert (result["logprobs"] - expected["logprobs"]).abs().max() <= logprobs and expected["logprobs"].std() > 0.1
    for name, gradient in expected["gradients"].items():
        assert (result["gradients"][name] - gradient).norm() <= gradients * gradient.norm(), name


@pytest.mark.parametrize(
    "backend, reduction, recompute, ranks",
    [
        ("transformer_engine", "fast", "none", 1),
        long("transformer_engine", "fast", "none", 2),
        long("deep_gemm", "fast", "selective", 1),
        long("deep_gemm", "tree", "none", 2),
    ],
)
def test_quantized_swiglu_changes_no_bit(worlds, model_folder, backend, reduction, recompute, ranks):
    precision = {"mode": "fp8_unified", "backend": backend, "reduction": reduction}
    args = quantize_swiglu, model_folder("qwen3", num_hidden_layers=2), BATCH, precision, recompute
    for fused, alone in worlds(ranks).call(with_and_without, *args):
        assert_alike(fused, alone, 0, 0)
        assert all(gradient.any() for gradient in alone["gradients"].values())
        assert fused["operators"] == 0 < alone["operators"]
        assert fused["recorded"] == alone["recorded"] and len(fused["recorded"]) == 2, "a recording still sees SwiGLU's result"


@pytest.mark.parametrize(
    "backend, reduction, recompute, ranks",
    [
        ("transformer_engine", "fast", "none", 2),
        ("deep_gemm", "tree", "full", 1),
        ("deep_gemm", "fast", "selective", 1),
        long("transformer_engine", "fast", "none", 1),
    ],
)
def test_quantized_norms_keep_the_bits_of_log_probs(worlds, model_folder, backend, reduction, recompute, ranks):
    precision = {"mode": "fp8_unified", "backend": backend, "reduction": reduction}
    args = quantize_norms, model_folder("qwen3", num_hidden_layers=2), BATCH, precision, recompute
    for fused, alone in worlds(ranks).call(with_and_without, *args):
        assert_alike(fused, alone, 0, 0.02)  # the norm rounds elsewhere
        added = {"none": [False, True, True, True], "full": [False, True, False, True], "selective": [False, True]}[recompute]
        assert fused["calls"][: len(added)] == added and not alone["calls"], "which norms add the residual, layer by layer"
        assert fused["in_vain"] == alone["in_vain"] == 0, "log-probs quantize nothing for WGrad"
        assert fused["recorded"] == alone["recorded"] and fused["recorded"], "a recording still sees a norm's result"


@pytest.mark.parametrize("model, groups, ranks", [("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3", 1, 2)])
def test_queries_and_keys_in_one_pass_are_the_same(worlds, model_folder, model, groups, ranks):
    """In the last case two ranks share a key-value head."""
    args = rotate_heads, model_folder(model, num_hidden_layers=2, num_key_value_heads=groups), BATCH
    for fused, alone in worlds(ranks).call(with_and_without, *args):
        assert fused["calls"] == 4 and not alone["calls"], "two layers, for log-probs and for gradients"
        assert_alike(fused, alone, 0.02, 0.02)


@pytest.mark.parametrize("name", [name if name in ("glm4", "deepseek_v3") else long(name) for name in QUANTIZED])
def test_rotary_positions_and_swiglu_on_a_gpu_are_megatrons(worlds, model_folder, name):
    args = run_gpu_operators, model_folder(name, num_hidden_layers=2), FP32, BATCH[:5]
    ours, megatrons = worlds(1).call(with_and_without, *args)[0]
    assert_alike(ours, megatrons, 1e-5, 1e-5)


@pytest.mark.parametrize(
    "kind, precision, layout",
    [
        ("deepseek_v3", FP32, Layout()),
        long("deepseek_v3", FP8, Layout()),
        long("deepseek_direct_q", FP32, Layout()),
        long("deepseek_v3", FP32, Layout(tp=2)),
    ],
)
def test_absorbed_latent_attention_is_the_expanded_one(worlds, model_folder, kind, precision, layout):
    args = absorb_latents, model_folder(kind, num_hidden_layers=2), precision, BATCH[:5], layout
    absorbed, expanded = worlds(layout.world_size).call(with_and_without, *args)[0]
    bound = 1e-5 if precision is FP32 else 0.1  # in FP8 the order of sums moves single activations to the next E4M3 number
    assert_alike(absorbed, expanded, bound, bound)
    assert all(gradient.any() for gradient in expanded["gradients"].values())


@pytest.mark.long
def test_latent_attention_without_sequence_parallelism_has_the_gradients_of_one_process(worlds, model_folder):
    folder = model_folder("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2)  # Megatron demands it for experts
    batches = [random_sequences(7, seed=1), random_sequences(5, seed=2)]
    plain = {"micro_batch_tokens": 60, "adam_eps": 1e-4, "layout": {"sequence_parallel": False}}
    alone, result = (worlds(tp).call(trainer.train_grpo, folder, FP32, plain, batches, Layout(tp=tp, etp=1))[0] for tp in (1, 2))
    for step, wanted in zip(result["steps"], alone["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert (result["after"] - alone["after"]).abs().max() < 1e-4 * alone["after"].std()


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.long)])
def test_grouped_products_train_as_one_expert_after_the_other(worlds, model_folder, recompute):
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    grouped, alone = worlds(1).call(with_and_without, group_experts, folder, BATCH, recompute)[0]
    assert_alike(grouped, alone, 0.05, 0.05)
    assert (grouped["after"] - alone["after"]).abs().max() < 0.05 and alone["after"].std() > 0.1
    assert (grouped["after"] - grouped["logprobs"]).abs().max() > 0.01, "the new blocks are contiguous again"
    # two linear layers of every expert: FProp and DGrad, and FProp again if it is recomputed; WGrad
    assert grouped["calls"]["m_grouped_fp8_gemm_nt_contiguous"] == SPARSE * 2 * (3 if recompute == "selective" else 2)
    assert grouped["calls"]["k_grouped_fp8_gemm_nt_contiguous"] == SPARSE * 2
    assert grouped["in_place"] == [True, True], "WGrad adds to gradients that are contiguous"
    others = grouped["calls"]["fp8_gemm_nt"]
    assert alone["calls"]["fp8_gemm_nt"] - others > SPARSE * 2 * 3 * EXPERTS / 2 and others <= LAYERS * 4 * 4
    assert all(detail.endswith("DeepGemmExperts") for detail in grouped["details"] if "Linear" in detail)
    assert not any("DeepGemmExperts" in detail for detail in alone["details"])


def test_experts_train_on_blackwell_as_on_hopper(worlds, model_folder):
    """The same bytes and scales in another layout; one DeepGEMM function of WGrad takes the other's place."""
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    on_hopper, on_blackwell = (worlds(1).call(group_experts, folder, BATCH, "none", True, blackwell)[0] for blackwell in (False, True))
    assert torch.equal(on_hopper["logprobs"], on_blackwell["logprobs"]) and torch.equal(on_hopper["after"], on_blackwell["after"])
    assert (on_blackwell["after"] - on_blackwell["logprobs"]).abs().max() > 0.01 and on_blackwell["in_place"] == [True, True]
    for name, gradient in on_hopper["gradients"].items():
        assert torch.equal(gradient, on_blackwell["gradients"][name]), name
    _, of_hopper, of_blackwell = GROUPED
    assert on_hopper["calls"][of_hopper] == on_blackwell["calls"][of_blackwell] == SPARSE * 2
    assert of_blackwell not in on_hopper["calls"] and of_hopper not in on_blackwell["calls"]


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), pytest.param(Layout(tp=2, dp=2, ep=4, etp=1), marks=pytest.mark.long)])
def test_without_gradient_bytes_and_scales_go_to_the_experts_for_the_same_bits(worlds, model_folder, layout):
    folder = model_folder("qwen3_moe", num_hidden_layers=LAYERS, num_experts=EXPERTS)
    ranks = worlds(layout.world_size).call(with_and_without, dispatch_packed, folder, BATCH, layout)
    for packed, whole in ranks:
        assert packed["logprobs"].std() > 0.1 and (packed["after"] - packed["logprobs"]).abs().max() > 0.01
        assert torch.equal(packed["logprobs"], whole["logprobs"]) and torch.equal(packed["after"], whole["after"])
        assert packed["updated"] == whole["updated"] and "int32" not in whole["scored"]
    packed, whole = ({name: sum(rank[way]["scored"].get(name, 0) for rank in ranks) for name in ("int32", "bfloat16")} for way in (0, 1))
    one_way = whole["bfloat16"] // 2  # to the experts, or back; a token's weights are FP32
    assert packed == {"int32": one_way * (1 + 4 / 128) / 2, "bfloat16": one_way}
