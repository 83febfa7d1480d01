"""The planner: formulas against values computed by hand, the shipped configurations, refusals, and the command's output."""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.families import ARCHITECTURES
from support.geometries import PUBLISHED, published_model
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from megatron_rl.batch.packing import LOGITS_PER_CHUNK, LOGITS_PER_GPU_CHUNK
from megatron_rl.batch.sample_bytes import SampleBytes
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.cli.main import app
from megatron_rl.config import Config, load_config
from megatron_rl.cost import activations, operators, weights
from megatron_rl.cost.activations import count_logits
from megatron_rl.cost.hardware import Cluster
from megatron_rl.cost.operators import RankShapes
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.errors import UserError
from megatron_rl.kernels.linear.deep_gemm import DeepGemmBackend
from megatron_rl.kernels.linear.transformer_engine import pad_scales
from megatron_rl.planner import memory_by_phase, roofline
from megatron_rl.planner.search import Planner
from megatron_rl.planner.sync_traffic import estimate_sync_traffic
from megatron_rl.precision import quantizers
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.preflight import LAYOUTS, PLAN, Facts, Needs, check
from megatron_rl.sync.plan import SyncPlan
from parallel import row_sums
from parallel.adapters import is_adapter
from parallel.families import FAMILIES
from parallel.formats import FORMATS, FP8
from parallel.layout import Layout, balance_stages, check_stages
from parallel.model_geometry import ModelGeometry

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = {"Qwen3-8B": 1, "Qwen2.5-32B": 4, "Qwen3-30B-A3B": 2, "Qwen3-235B-A22B": 16}  # nodes
HYBRID_EXAMPLES = {"Qwen3.5-9B": 1, "Qwen3.5-35B-A3B": 2, "Qwen3-Next-80B-A3B": 4, "Qwen3.5-122B-A10B": 8}
NODE = Cluster.from_options(1, 8, "h100")


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # paths of shipped configurations are relative to it


def job(name: str = "Qwen3-8B", **sections: object) -> Workload:
    model = {"rope_theta": 1e6, "max_position_embeddings": 40960, **PUBLISHED[name]}
    train = {"layout": {"sequence_parallel": "num_experts" in model}}
    table = {"model": {"path": "x"}, "precision": {"backend": "transformer_engine"}, "train": train, **sections}
    return Workload.from_config(Config.model_validate_json(json.dumps(table)), model)


def test_a_dense_models_bytes_by_hand():
    """Qwen3-8B on one rank: 2 embeddings of 151936 x 4096, 36 layers of 192.9 million FP8 weights, norms."""
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288
    vectors = 36 * (2 * 4096 + 2 * 128) + 4096
    embeddings, fp8 = 2 * 151936 * 4096, 36 * layer
    held = weights.count_trainer_memory(job(), Layout(), 0)
    assert held.weights == 2 * (embeddings + vectors)
    assert held.blocks == fp8 + 4 * fp8 // 128**2
    assert held.gradients == 4 * (fp8 + embeddings + vectors)
    assert held.masters == 4 * (fp8 + embeddings + vectors)
    assert held.moments == 8 * (fp8 + embeddings + vectors)
    largest, buffer = 2 * 12288 * 4096, job().config.sync.bucket_mb << 20
    made = [weights.count_sync_memory(each, Candidate(Layout()), 0) for each in (job(precision={"mode": "fp8_rollout"}), job())]
    assert made == [held.blocks + 8 * largest - 4 * largest // 128**2, buffer], "a sync to an FP8 rollout makes the blocks"


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_quantizing_a_weight_takes_the_planned_bytes(name):
    weight = torch.randn(512, 1024).bfloat16()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = quantizers.quantize(weight, FORMATS[name])
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert peak == pytest.approx(weights._QUANTIZER_BYTES[name] * weight.numel(), rel=0.02) and kept.data.itemsize == 1


def test_adapters_alone_are_trained_and_sent_after_the_first_sync():
    """Rank 16 on all linear layers. q, k and v share their A, and so do gate and up."""
    plain, adapted = (job(**each, algorithm={"kl_coef": 0.1}) for each in ({}, {"lora": {}}))
    before, held = (weights.count_trainer_memory(each, Layout(), 0) for each in (plain, adapted))
    values = 36 * 16 * ((4096 + 6144) + (4096 + 4096) + (4096 + 2 * 12288) + (12288 + 4096))
    assert (held.gradients, held.masters, held.moments, held.weights) == (4 * values, 4 * values, 8 * values, before.weights + 2 * values)
    assert held.blocks == before.blocks
    candidate = Candidate(Layout(tp=4, dp=2), 4, 1, 2)
    phases = memory_by_phase.estimate_phase_memory(adapted, candidate)
    assert not any(phase.parts["reference"] for phase in phases if "reference" in phase.parts)
    whole, later = (estimate_sync_traffic(each, candidate, NODE) for each in (plain, adapted))
    assert whole.first == sum(whole.total.values()) and later.first == whole.first + sum(later.total.values())
    plan = SyncPlan.make(adapted.model, candidate.train, candidate.rollout, adapted.contract, 1 << 28)
    assert sum(later.total.values()) == sum(transfer.nbytes for transfer in plan.transfers if is_adapter(transfer.source))
    assert roofline.estimate_step_time(adapted, candidate, NODE).train < roofline.estimate_step_time(plain, candidate, NODE).train


@pytest.mark.parametrize("rows, cols", [(256, 384), (1536, 4096)])
def test_operands_are_what_the_back_ends_make(rows, cols):
    blocks = quantize_weight(torch.randn(rows, cols), "pow2")
    transposed, scales = DeepGemmBackend(FP8.with_scales("pow2")).prepare(blocks, None).dgrad
    assert weights.count_operand_bytes("deep_gemm", FP8, rows, cols) == transposed.numel() + 4 * scales.numel()
    padded = pad_scales(blocks.scale).numel() + pad_scales(blocks.scale.t()).numel()
    assert weights.count_operand_bytes("transformer_engine", FP8, rows, cols) == rows * cols + 4 * padded


def test_only_grouped_products_have_the_blocks_of_experts_a_second_time():
    """With sums by tree, experts run one after the other."""
    fast, tree = (job("Qwen3-30B-A3B", precision={"backend": "transformer_engine", "reduction": each}) for each in ("fast", "tree"))
    operands = [weights.count_trainer_memory(each, Layout(dp=8, ep=8), 0).operands for each in (fast, tree)]
    assert operands[0] - operands[1] == pytest.approx(48 * 16 * 3 * 2048 * 768, rel=0.01)


def test_the_kv_cache_of_a_rank_holds_its_heads_or_mlas_one_latent():
    for tp, kv_heads in ((1, 8), (8, 1), (16, 1)):
        assert weights.count_kv_bytes_per_token(job(), tp) == 36 * 2 * kv_heads * 128 * 2
        assert weights.count_kv_bytes_per_token(job(precision={"kv": "e4m3_per_layer"}), tp) == 36 * 2 * kv_heads * 128
    deepseek = PUBLISHED["DeepSeek-V3"] | {
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
    }
    for kv, nbytes in (("high", (512 + 64) * 2), ("e4m3", 512 + 1 + 64 + 1)):  # a byte for a number, one for a scale
        config = Config.model_validate_json(json.dumps({"model": {"path": "x"}, "precision": {"kv": kv}}))
        assert weights.count_kv_bytes_per_token(Workload.from_config(config, deepseek | {"rope_theta": 1e4}), 8) == 61 * nbytes


def test_a_trained_mtp_layer_is_the_last_stages():
    """The layer has gradients, and a copy of the embedding has none."""
    fields = ARCHITECTURES["glm4_moe"] | {"num_nextn_predict_layers": 1}
    config = Config.model_validate_json('{"model": {"path": "x"}, "train": {"mtp_loss_scaling_factor": 0.1}}')
    trained, layout = Workload.from_config(config, fields), Layout(pp=2)
    model = trained.model
    held = [[weights.count_trainer_memory(each, layout, stage) for each in (trained, trained.scored)] for stage in (0, 1)]
    mtp = [weight for weight in model.list_weights()[-1] if weight.megatron.startswith("mtp.")]
    numbers = sum(rect.rows * rect.cols for weight in mtp for _, rect, *_ in weight.pieces if "expert_bias" not in weight.megatron)
    assert [one.gradients - other.gradients for one, other in held] == [0, 4 * numbers]
    assert trained.trained_mtp_layers == 1 and trained.scored.trained_mtp_layers == 0
    assert held[1][0].weights - held[1][1].weights > 2 * model.vocab * model.hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_planned_as_trainer_and_engine_hold_it(family):
    """On one rank every byte of data and scales: four layers, with and without experts. A vocabulary of 384 rows needs no padding."""
    changes = {"mlp_only_layers": []} if "mlp_only_layers" in ARCHITECTURES[family] else {}
    model = ModelGeometry.from_hf_config(ARCHITECTURES[family] | changes)
    workload = replace(job(), model=model)
    plan = SyncPlan.make(model, Layout(), (1, 1), workload.contract, 1 << 28)
    assert weights.count_engine_weights(workload, 1, 1) == sum(transfer.nbytes for transfer in plan.transfers)
    values = sum(tensor.rows * tensor.cols for tensor in model.tensors().values() if tensor.role != "router_bias")
    assert weights.count_trainer_memory(workload, Layout(), 0).gradients == 4 * values
    assert 0 < operators.count_flops_per_token(workload)[0] <= 2 * values


def test_activations_shrink_with_tensor_parallelism_and_recomputation():
    workload = job()

    def kept(layout: Layout, recompute: str = "none") -> float:
        return activations.count_training_activations(workload, Candidate(layout, recompute=recompute), 0).kept

    assert kept(Layout(tp=8)) < kept(Layout(tp=2)) < kept(Layout())
    tokens = workload.tokens_per_rank(1)
    assert kept(Layout(pp=2), "full") == 18 * tokens * 4096 * 2 * 2  # 18 layers' inputs of two micro-batches
    assert kept(Layout(), "full") < kept(Layout(), "selective") < kept(Layout())
    long = job(rollout={"max_new_tokens": 16384}, data={"max_prompt_tokens": 1024})
    assert (long.tokens_per_rank(1), long.tokens_per_rank(4)) == (17408, 8192), "a longer sequence than the bound has a pass of its own"
    logits = {count_logits(RankShapes(long, Layout(), tokens), training=False) for tokens in (300, 17408, 1e6)}
    assert logits == {2 * 300 * 151936, 2 * LOGITS_PER_GPU_CHUNK}
    filtered = RankShapes(job(rollout={"top_k": 5}), Layout(tp=8), 1e6)
    assert count_logits(filtered, training=False) == (2 + 8) * LOGITS_PER_CHUNK


def test_experts_that_run_at_once_have_padded_rows_which_take_time(monkeypatch):
    """The 16 experts of a Qwen3-235B-A22B rank share 8 rows per token. Experts that run one after the other need no padding. Padding is
    20 % of the FLOPs of three products in 94 layers, whose tokens meet 8 experts of 3 x 1536 x 4096."""
    layout = Layout(tp=8, ep=8, etp=1)

    def plan(tokens: int, **precision: str) -> Workload:
        precision = {"backend": "transformer_engine", "reduction": "fast"} | precision
        return job("Qwen3-235B-A22B", precision=precision, train={"micro_batch_tokens": tokens})

    def rows(tokens: int, **precision: str) -> float:
        return RankShapes(plan(tokens, **precision), layout, tokens).expert_rows

    def seconds() -> float:
        workload, candidate = plan(5120), Candidate(layout)
        micro_batches = candidate.micro_batches(workload) * workload.config.algorithm.updates_per_step
        return roofline.estimate_step_time(workload, candidate, NODE).train / micro_batches

    assert (rows(6144), rows(5120), rows(1024)) == (16 * 384, 16 * 384, 16 * 128)
    assert rows(5120, backend="emulated") == rows(5120, reduction="tree") == rows(5120, mode="bf16") == 16 * 320
    padded = seconds()
    monkeypatch.setattr(RankShapes, "expert_rows", property(lambda shapes: shapes.routed_rows))
    flops, rates = 0.2 * 94 * 640 * 8 * 2 * 3 * 1536 * 4096, NODE.gpu.rates
    assert padded - seconds() == pytest.approx(2 * flops / rates["fp8"] + flops / rates["fp8 WGrad"])


def test_what_slices_cost():
    """With "ranks" and a larger tp of the engine, the trainer writes and reads the products of slices, and sends all of them."""

    def seconds(tp: int, rollout_tp: int, reduction: str) -> float:
        precision = {"backend": "deep_gemm", "scale_format": "pow2", "reduction": reduction}
        workload = job(precision=precision, rollout={"tp": rollout_tp}, algorithm={"kl_coef": 0})
        return roofline.estimate_step_time(workload, Candidate(Layout(tp=tp, dp=8 // tp)), NODE).trainer

    assert all(seconds(tp, tp, "ranks") == seconds(tp, tp, "fast") for tp in (1, 2)), "one slice per rank costs nothing"
    four, eight = (seconds(1, tp, "ranks") - seconds(1, tp, "fast") for tp in (4, 8))
    assert four > 0 and eight == pytest.approx(2 * four)
    assert 1 < seconds(1, 8, "ranks") / seconds(1, 8, "fast") < 1.2
    jobs = [job(precision={"reduction": "ranks"}, rollout={"tp": tp}) for tp in (1, 64)]
    working = [activations.count_working(RankShapes(each, Layout(), 100)) for each in jobs]
    assert working[1] == 65 * 2 * 4096 * 100 > working[0]


def test_what_sums_by_the_tree_cost():
    """At tp 4 half of the sent bytes are FP32 partial sums instead of BF16, and products are slower."""
    sent = [row_sums.count_bytes_sent(4, 2, scattered, by_tree) for scattered in (False, True) for by_tree in (True, False)]
    assert sent == [4.5, 3.0, 3.0, 1.5]
    slower = 36 * 2 * 4096 * (4096 + 12288) * (1 / (64 * 5.5e12) - 1 / NODE.gpu.rates["fp8"])
    forwards = 8192 * (2 * job().config.algorithm.updates_per_step)  # in training, and for log-probs
    candidate = Candidate(Layout())
    algorithm = {"kl_coef": 0}

    def seconds(candidate: Candidate, **sections: object) -> list[float]:
        jobs = [job(precision={"backend": "transformer_engine", "reduction": each}, **sections) for each in ("tree", "fast")]
        return [roofline.estimate_step_time(each, candidate, NODE).step for each in jobs]

    tree, fast = seconds(candidate, algorithm=algorithm)
    assert tree - fast == pytest.approx(forwards * candidate.micro_batches(job(algorithm=algorithm)) * slower)
    tree, fast = seconds(Candidate(Layout(tp=4, dp=2), rollout_tp=2, engines=4))
    assert 1 < tree / fast < 1.4
    workings = [activations.count_working(RankShapes(job(precision={"reduction": r}), Layout(tp=8), 100)) for r in ("tree", "fast")]
    assert workings[0] == 8 * 4096 * 100 > workings[1]


def test_micro_batches_in_flight_and_the_pipelines_bubble():
    one_chunk, two_chunks = Layout(pp=4), Layout(pp=4, vpp=2)
    cases = [(one_chunk, 0, 9, 4), (one_chunk, 3, 9, 1), (one_chunk, 0, 2, 2), (two_chunks, 0, 9, 11 / 2), (two_chunks, 3, 9, 5 / 2)]
    for layout, stage, count, in_flight in cases:
        assert activations.count_in_flight(layout, stage, count) == in_flight
    for pp, vpp, count, share in ((1, 1, 7, 0), (4, 1, 8, 3 / 11), (4, 2, 8, 3 / 19), (8, 1, 1, 7 / 8)):
        assert roofline.bubble_fraction(pp, vpp, count) == pytest.approx(share)


def test_the_last_stage_with_its_output_layer_sets_a_pipelines_pace():
    """The last stage has a quarter of the layers and the whole output layer."""
    workload = job(precision={"reduction": "fast", "backend": "transformer_engine"})
    one, four = Candidate(Layout()), Candidate(Layout(pp=4))
    linear, attention, outputs = operators.count_flops_per_token(workload)
    assert outputs == 2 * 151936 * 4096
    seconds = [roofline.estimate_step_time(workload, each, NODE).train for each in (one, four)]
    rates = NODE.gpu.rates
    layers = 2 * linear / rates["fp8"] + linear / rates["fp8 WGrad"] + 3 * attention / rates["attention"]
    output_layer = 3 * outputs / rates["bf16"]
    tokens = 8192 * one.micro_batches(workload)
    assert seconds[0] == pytest.approx(tokens * (layers + output_layer), rel=0.01)
    bubble = roofline.bubble_fraction(4, 1, four.micro_batches(workload))
    assert seconds[1] == pytest.approx(tokens * (layers / 4 + output_layer) / (1 - bubble), rel=0.01)
    uneven = Candidate(Layout(pp=4, first_stage_layers=10, last_stage_layers=4))  # of 36 layers: others have 11
    pace = roofline.estimate_step_time(workload, uneven, NODE).train
    assert pace == pytest.approx(tokens * layers * 11 / 36 / (1 - bubble), rel=0.01)


def test_stages_are_planned_that_take_about_as_long():
    """94 layers do not divide into eight stages, and the output layer takes longer than a layer."""
    workload, cluster = job("Qwen3-235B-A22B"), Cluster.from_options(16, 8, "h200")
    layout = Layout(tp=8, pp=8, dp=2, ep=8, etp=1)
    assert 1 < roofline.weigh_output_layer(workload, layout, cluster) < 2
    found = list(Planner(workload, cluster)._layouts(128))
    assert replace(layout, last_stage_layers=10) in found and not [each for each in found if each.pp == 64]
    for each in found:
        check_stages(94, each)
    candidate = Candidate(Layout(tp=8, pp=8, first_stage_layers=11, last_stage_layers=11, dp=2, ep=8, etp=1))
    assert candidate.describe() == "tp 8 pp 8 first 11 last 11 dp 2 ep 8 etp 1"
    overrides = candidate.overrides(load_config(ROOT / "configs/qwen3_8b.toml", []))
    assert {"--train.layout.first_stage_layers=11", "--train.layout.last_stage_layers=11"} < set(overrides)


@pytest.mark.parametrize(
    "name, train, tp, ep", [("Qwen3-8B", Layout(tp=4, pp=2), 2, 1), ("Qwen3-30B-A3B", Layout(tp=2, ep=4, etp=1, dp=4), 4, 4)]
)
def test_the_syncs_bytes_are_those_of_the_whole_plan(name, train, tp, ep):
    workload = job(name)
    model = replace(workload.model, attention=workload.model.attention[:2])
    candidate = Candidate(train, tp, ep, engines=1, placement="disaggregated")
    load = estimate_sync_traffic(replace(workload, model=model), candidate, Cluster.from_options(2, 8, "h100"))
    plan = SyncPlan.make(model, train, (tp, ep), workload.contract, 1 << 30)
    assert sum(load.total.values()) == sum(transfer.nbytes for transfer in plan.transfers)
    assert load.total["same"] == 0


def test_the_same_cut_on_the_same_gpus_moves_nothing_over_a_link():
    load = estimate_sync_traffic(job(), Candidate(Layout(tp=4, dp=2), 4, 1, 2), NODE)
    assert load.total["node"] == load.total["network"] == 0 < load.total["same"]
    apart = estimate_sync_traffic(job(), Candidate(Layout(tp=8), 8, 1, 1, "disaggregated"), Cluster.from_options(2, 8, "h100"))
    assert apart.total["same"] == apart.total["node"] == 0 and apart.seconds > apart.busiest["network"] / 50e9 > 0


def test_a_gpu_whose_memory_others_open_by_cuda_ipc_holds_a_context_of_each():
    """With a trainer at tp 8 and two engines at tp 4, each trainer GPU sends to ranks of both engines."""
    same, others = Candidate(Layout(tp=4, dp=2), 4, 1, 2), Candidate(Layout(tp=8), 4, 1, 2)
    for candidate, transport, readers in ((same, "cuda_ipc", 0), (others, "cuda_ipc", None), (others, "gloo", 0)):
        planner = Planner(job(sync={"transport": transport}), NODE)
        before = planner.estimate(candidate)
        after = planner.with_sync(before)
        readers = after.sync.readers if readers is None else readers
        assert [gpu.total for gpu in after.memory] == [gpu.total + readers * 2**29 for gpu in before.memory]
        assert after.spare == before.spare - readers * 2**29
    assert estimate_sync_traffic(job(), others, NODE).readers >= 2
    apart = Planner(job(sync={"transport": "cuda_ipc"}), NODE)
    estimate = apart.with_sync(apart.estimate(Candidate(Layout(tp=4), 4, 1, 1, "disaggregated")))
    assert estimate.sync.readers >= 1 and {gpu.gpus for gpu in estimate.memory if "IPC contexts" in gpu.parts} == {"trainer"}


def test_shared_gpus_hold_by_turns_and_a_critic_has_a_phase_of_its_own():
    shared, apart = Candidate(Layout(tp=8), 8, 1, 1), Candidate(Layout(tp=4), 4, 1, 1, "disaggregated")
    plain, ppo = job(), job(algorithm={"name": "ppo"})
    held = weights.count_trainer_memory(ppo.critic, shared.train, 0)
    policy, vocabulary = weights.count_trainer_memory(plain, shared.train, 0), 2 * 151936 // 8 * 4096
    assert held.weights == policy.weights - vocabulary + 2 * 4096
    without, parts = ({phase.phase: phase.parts for phase in memory_by_phase.estimate_phase_memory(each, shared)} for each in (plain, ppo))
    assert "KV cache" in without["generate"] and "KV cache" not in without["train"]
    assert "optimizer" in without["train"] and "optimizer" not in without["generate"]
    assert [*parts] == ["generate", "logprobs", "critic", "train", "sync", "resume"]
    assert "activations" not in parts["resume"] and parts["resume"]["optimizer"] == parts["train"]["optimizer"]
    assert parts["resume"]["critic"] == held.weights + held.blocks + held.gradients + held.optimizer
    assert parts["generate"]["critic"] == parts["train"]["critic"] == held.weights + held.blocks
    assert parts["critic"]["critic"] == held.model + held.transposed + held.gradients + held.optimizer
    assert "optimizer" in parts["train"] and not {"optimizer", "gradients"} & {*parts["critic"], *parts["logprobs"]}
    assert {name: size for name, size in parts["train"].items() if name != "critic"} == without["train"]
    assert memory_by_phase.count_offloaded_bytes(plain, shared) == policy.optimizer
    assert memory_by_phase.count_offloaded_bytes(ppo, shared) == policy.optimizer + held.optimizer
    assert {phase.gpus for phase in memory_by_phase.estimate_phase_memory(plain, apart)} == {"trainer", "engine"}
    of_trainer = [phase.parts for phase in memory_by_phase.estimate_phase_memory(ppo, apart) if phase.gpus == "trainer"]
    assert all({"optimizer", "gradients"} <= phase.keys() for phase in of_trainer)
    seconds = [roofline.estimate_step_time(each, shared, NODE) for each in (plain, ppo)]
    assert seconds[0].critic == 0 < seconds[1].critic < seconds[1].train + seconds[1].logprobs and seconds[0].train == seconds[1].train


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_fullest_of_the_extreme_stages_is_the_fullest_of_all(data):
    """Layers with and without experts in any order, as `moe_layer_freq` gives them, on stages of unequal sizes."""
    layers, pp = data.draw(st.integers(2, 24)), data.draw(st.integers(1, 8))
    vpp = data.draw(st.sampled_from([1, 2])) if pp > 1 else 1
    balanced = balance_stages(layers, pp, vpp, data.draw(st.sampled_from([0.5, 1.0, 3.0])))
    assume(balanced is not None)
    layout = Layout(tp=2, pp=pp, vpp=vpp, first_stage_layers=balanced[0], last_stage_layers=balanced[1], dp=2, ep=2, etp=1)
    dense = frozenset(data.draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1)))
    geometry = published_model("GLM-4.5" if data.draw(st.booleans()) else "Qwen3-30B-A3B")
    model = replace(geometry, attention=geometry.attention[:layers], experts=replace(geometry.experts, count=16, dense_layers=dense))
    workload = replace(job("Qwen3-30B-A3B"), model=model)
    candidate = Candidate(layout, recompute=data.draw(st.sampled_from(["none", "selective", "full"])))
    for phase in ("logprobs", "train", "sync"):
        totals = [sum(memory_by_phase.count_trainer_parts(workload, candidate, stage, phase).values()) for stage in range(pp)]
        assert max(totals) == max(totals[stage] for stage in weights.list_extreme_stages(workload, layout))


def test_the_search_ranks_what_fits_and_an_engine_takes_several_nodes_where_one_cannot_hold_it():
    """The second search is for a KV cache of 88 GB in addition to the weights, on nodes with one GPU each."""
    results = Planner(job(), NODE).search(3)
    assert len(results.ranked) == 3 and results.tried > 50
    steps = [verdict.seconds.step for verdict in results.ranked]
    assert steps == sorted(steps) and all(verdict.fits for verdict in results.ranked)
    assert len({(verdict.candidate.train, verdict.candidate.placement) for verdict in results.ranked}) == 3
    workload, cluster = job(rollout={"max_total_tokens": 600_000}), Cluster.from_options(8, 1, "h100")
    best = Planner(workload, cluster).search(1).ranked[0].candidate
    assert (best.rollout_tp, best.nodes_per_engine) == (2, 2) and best.describe_engines() == f"{best.engines} x tp 2 on 2 nodes each"
    suggested = best.overrides(workload.config)
    assert {"--rollout.tp=2", "--rollout.nodes_per_engine=2", f"--rollout.engines={best.engines}"} <= set(suggested)
    apart = replace(best, nodes_per_engine=1)  # as if both GPUs were in one node
    assert roofline.estimate_generation(workload, best, cluster) > roofline.estimate_generation(workload, apart, cluster)
    small = Planner(job(), cluster).search(1).ranked[0].candidate
    assert (small.rollout_tp, small.nodes_per_engine) == (1, 1)


def test_a_layout_that_cuts_blocks_is_refused_with_those_that_work():
    cut = Candidate(Layout(tp=4, etp=4), 8)  # 768 / 4 = 192 rows of an expert
    with pytest.raises(UserError) as refused:
        check(cut.facts(job("Qwen3-30B-A3B"), NODE), PLAN | LAYOUTS)
    line = str(refused.value)
    assert "cuts a 128x128 FP8 block" in line and "train layouts that work: tp=4 ep=1 etp=2" in line


ALONE = "--placement.kind=disaggregated"


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [ALONE],
        ["--algorithm.correction=icepop"],
        ["--algorithm.old_policy=engine"],
        ["--log.attribute_every=5"],
        ["--sync.running=continue", "--algorithm.routing_replay=engine"],
        [ALONE, "--placement.max_staleness=3", "--log.attribute_every=5"],
    ],
)
def test_what_is_suggested_passes_the_rules_of_train(overrides, placement):
    file = ROOT / "configs" / "quickstart.toml"
    suggestions = Candidate(Layout(tp=2), 2, engines=2, placement=placement).overrides(load_config(file, overrides))
    suggested = load_config(file, [*overrides, *suggestions])
    check(Facts(suggested), Needs.TRAINER)
    assert suggested.placement.kind == placement and bool(suggested.placement.max_staleness) == (placement == "disaggregated")
    corrected = placement == "disaggregated" and not any("algorithm" in word for word in overrides[:1])
    assert ("--algorithm.correction=tis" in suggestions) == corrected


@pytest.mark.parametrize(
    "candidate, nodes, problem",
    [
        (Candidate(Layout(tp=8, dp=4), 8, 1, 4), 4, ""),
        (Candidate(Layout(tp=8, dp=2), 8, 1, 1), 2, "rollout.engines = 1: must be a multiple of the nodes with engines (2)"),
        (Candidate(Layout(tp=8, dp=4), 16, 1, 2, nodes_per_engine=2), 4, ""),
        (Candidate(Layout(tp=8), 16, 1, 1, "disaggregated", nodes_per_engine=2), 3, ""),
        (Candidate(Layout(tp=4, dp=3), 4, 1, 2), 2, "train.layout: needs 12 ranks (tp * cp * pp * dp), but this launch has 16; "),
        (Candidate(Layout(tp=8), 4, 1, 3, "disaggregated"), 3, "rollout.engines = 3: must be a multiple of the nodes with engines (2)"),
        (Candidate(Layout(tp=4), 4, 1, 1, "disaggregated"), 1, "train.layout: needs 4 ranks (tp * cp * pp * dp), but this launch has 0; "),
    ],
)
def test_a_plan_says_what_no_batch_script_starts(candidate, nodes, problem):
    found = candidate.find_launch_problem(job(), Cluster.from_options(nodes, 8, "h100"))
    assert bool(found) == bool(problem) and found.startswith(problem)


def test_a_plans_batch_file_says_how_many_nodes_the_engines_have(tmp_path):
    options = ["--nodes", "3", "--top", "1", "--sbatch", str(tmp_path / "job.sbatch"), ALONE, "--rollout.tp=8", "--rollout.engines=2"]
    layout = ["--train.layout.tp=8", "--train.layout.dp=1"]
    result = CliRunner().invoke(app, ["plan", "configs/qwen3_8b.toml", *options, *layout])
    batch = (tmp_path / "job.sbatch").read_text()
    assert "export ENGINE_NODES=2\nexec bash" in batch and "launch/slurm/disaggregated.sbatch" in batch and "does not start" not in batch
    assert result.exit_code == 0 and "--placement.max_staleness=1 --algorithm.correction=tis" in batch


def test_no_name_escapes_into_a_plans_batch_file(tmp_path):
    """The model's folder and the config file may have any name."""
    for number, name in enumerate(("two words", "a;touch x", "a\n#SBATCH --nodes=9\ntouch x", "$(touch x)`touch x`", "'\"\\ü", "-x", "..")):
        (folder := tmp_path / str(number) / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "configs" / "models" / "Qwen3-8B" / "config.json", folder)
        (config := folder / "run.toml").write_text((ROOT / "configs" / "qwen3_8b.toml").read_text())
        job = tmp_path / "job.sbatch"
        options = ["--top", "1", "--sbatch", str(job), f"--model.path={folder}", "--nodes", "1"]
        result = CliRunner().invoke(app, ["plan", str(config), *options])
        assert result.exit_code == 0, result.output
        head, _, command = os.fsdecode(job.read_bytes()).partition("set -euo pipefail\n")
        assert all(line.startswith("#") for line in head.splitlines()) and head.count("#SBATCH --nodes=") == 1
        assert re.search(r"^#SBATCH --job-name=[\w.+-]+$", head, re.MULTILINE | re.ASCII)
        words = shlex.split(command.partition("exec ")[2])
        assert words[:1] == ["bash"] and str(config) in words and f"--model.path={folder}" in words
        subprocess.run(["bash", "-n", job], check=True)


LONG = {model for model, nodes in EXAMPLES.items() if nodes > 4} | {model for model, nodes in HYBRID_EXAMPLES.items() if nodes > 1}


@pytest.mark.parametrize("model", [pytest.param(model, marks=[pytest.mark.long] * (model in LONG)) for model in EXAMPLES | HYBRID_EXAMPLES])
def test_the_shipped_examples_fit_and_their_geometries_are_the_published_ones(model, tmp_path):
    shipped = json.loads((ROOT / "configs" / "models" / model / "config.json").read_text())
    geometry = ModelGeometry.from_hf_config(shipped)
    published = published_model(model)
    attention = tuple(replace(kind, rope=geometry.rope) if kind.rope else kind for kind in published.attention)
    assert geometry == replace(published, norm_eps=geometry.norm_eps, attention=attention)
    name = re.sub(r"\W", "_", model.lower())
    config, out = ROOT / "configs" / f"{name}.toml", tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", str(config), "--top", "1", "--json", str(out), "--sbatch", str(tmp_path / "job.sbatch")])
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.stdout.splitlines()[1:] if not re.match(r"\d+\. ", line)) <= 120  # commands are not wrapped
    plan = json.loads(out.read_text())
    nodes = (EXAMPLES | HYBRID_EXAMPLES)[model]
    assert plan["cluster"]["nodes"] == nodes and plan["configured"] and plan["chosen"]["spare"] > 0
    batch = (tmp_path / "job.sbatch").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in batch and "#SBATCH --ntasks-per-node=8\n" in batch
    assert f"configs/{name}.toml" in batch
    assert "does not start" not in batch and "No batch script" not in result.stdout
    subprocess.run(["bash", "-n", tmp_path / "job.sbatch"], check=True)


@pytest.mark.parametrize(
    "options, line, best",
    [
        (["--nodes", "0"], "--nodes = 0: must be a positive number", False),
        (["--gpu", "v100"], "--gpu = 'v100': is not known; use one of h100, h200, h800, h20, b200, gb200, b300", False),
        (["--rollout.max_total_tokens=100000000"], "--nodes = 1: nothing fits on 1 node of 8 H100 SXM 80GB: the closest, ", False),
        (["--rollout.max_new_tokens=40960"], "rollout.max_new_tokens = 40960: plus data.max_prompt_tokens (1024) exceeds", False),
        (["--model.path=nowhere"], "model.path = 'nowhere': does not exist", False),
        (["--train.layout.tp=3", "--rollout.engines=1"], "train.layout.tp = 3: must divide vocab_size (151936)", True),
        (["--train.layout.tp=8", "--train.layout.dp=2"], "train.layout: needs 16 GPUs, 1 node of 8 H100 SXM 80GB have 8", True),
        (["--train.layout.tp=1", "--train.layout.dp=8"], "train.layout: needs 94.9 GiB of a GPU in phase train, of which 75.7 may", True),
        (["--rollout.tp=16"], "rollout.tp = 16: exceeds 8 GPUs per node * rollout.nodes_per_engine = 8 GPUs", True),
    ],
)
def test_what_does_not_work_is_refused_in_one_line_with_the_best_layout_if_there_is_one(options, line, best):
    result = CliRunner().invoke(app, ["plan", "configs/qwen3_8b.toml", "--nodes", "1", *options])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"megatron-rl: {line}") and result.stderr.count("\n") == 1
    assert ("the best layout is --train.layout." in result.stderr) == best == bool(result.stdout)
    assert not best or "The best layout" in result.stdout


def plan(model, *options, folder):
    """Return the output of `plan` without a configured layout, for changes of a published config.json."""
    (folder / "config.json").write_text(json.dumps({"rope_theta": 1e6, "max_position_embeddings": 40960, **model}))
    (folder / "run.toml").write_text(f'[model]\npath = "{folder}"\n[precision]\nbackend = "transformer_engine"\n')
    return CliRunner().invoke(app, ["plan", str(folder / "run.toml"), "--top", "1", *options])


@pytest.mark.parametrize(
    "name, change, options, remedy",
    [
        ("Llama-3.1-70B", {"intermediate_size": 29568}, ["--nodes=4"],  # the width of Qwen2.5-72B
         r"no layout works on 4 .* fits, but model.layers.0.mlp.gate_proj.weight .* export --checkpoint \S+ --output DIR --align 128"),
        ("Llama-3.2-1B", {"hidden_size": 2056}, ["--nodes=1"], "fits, but precision.backend = .* use emulated, or train in BF16"),
        ("Llama-3.1-70B", {}, ["--nodes=1"], "nothing fits on 1 node .*; give --nodes (2|4), or --gpu b200$"),
        ("Qwen3-8B", {}, ["--nodes=1", "--rollout.max_total_tokens=10000000"], r"; give --gpu b300, or --rollout.max_total_tokens=\d+$"),
        ("Qwen3-8B", {"intermediate_size": 1228800}, ["--nodes=1"], "; no more nodes or smaller batches help$"),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "modelopt"}}, ["--nodes=1"], "config.json quantization_config.quant_method"),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, ["--nodes=1"], "weight_block_size"),
    ],
)  # fmt: skip
def test_what_is_advised_works(name, change, options, remedy, tmp_path):
    """Advice that is given as options is followed: with it, a layout is found."""
    failed = plan(PUBLISHED[name] | change, *options, folder=tmp_path)
    assert failed.exit_code == 2 and re.search(remedy, failed.stderr.strip()), failed.stderr
    for option, value in re.findall(r"(?:; give|, or) (--\S+?)[ =](\w+)", failed.stderr):
        followed = plan(PUBLISHED[name] | change, *options, f"{option}={value}", folder=tmp_path)
        assert followed.exit_code == 0, followed.stderr


def test_weights_that_only_another_file_describes_are_refused(tmp_path):
    """As in NVIDIA's quantized checkpoints, whose config.json is that of the BF16 model. SGLang reads the other file."""
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    failed = plan(PUBLISHED["Qwen3-8B"], "--nodes=1", folder=tmp_path)
    assert failed.exit_code == 2 and "hf_quant_config.json': describes quantized weights that config.json does not" in failed.stderr


def test_each_side_is_refused_for_its_own_layout():
    """An engine that cuts a subtree of the sum must not make the planner drop the trainer's layout, or the other way round."""
    planner = Planner(job("Qwen3-30B-A3B"), NODE)
    good, engine = Layout(tp=4, etp=1, dp=2, ep=8), Candidate(Layout(tp=4, etp=1, dp=2, ep=8), 8, 1)
    assert planner.refuses(engine) and not planner.refuses(Candidate(good, 4, 4, 2))
    assert planner.refuses(Candidate(Layout(tp=4, etp=4, dp=2), 4, 4, 2)) and not planner.refuses(Candidate(good, 4, 4, 2))


def test_a_steps_samples_take_what_they_are_sent_as():
    lengths = {"data": {"max_prompt_tokens": 8}, "rollout": {"max_new_tokens": 400, "prompts_per_step": 2, "group_size": 2}}
    plain, replayed = (job("Qwen3-30B-A3B", algorithm={"routing_replay": each}, **lengths) for each in ("none", "engine"))
    experts = torch.zeros(407, replayed.model.layers, replayed.top_k, dtype=torch.uint8)
    for planned, options in ((plain, {}), (replayed, {"routed_experts": experts})):
        sample = TrainingSample(torch.zeros(8), torch.zeros(400), rollout_logprobs=torch.zeros(400), **options)
        assert memory_by_phase.count_sample_bytes(planned) == pytest.approx(SampleBytes([sample] * 4).total, rel=0.1)
        assert memory_by_phase.count_kept_bytes(planned) == 0


def test_kept_groups_are_held_and_trained_on():
    rollout, candidate = {"prompts_per_step": 256, "group_size": 8}, Candidate(Layout(dp=2))
    settings = {"rollout": rollout, "algorithm": {"correction": "tis"}}
    plain, replay = (job(**settings, replay=each) for each in (None, {"prompts_per_step": 128, "buffer_size": 512}))
    assert candidate.micro_batches(replay) == pytest.approx(1.5 * candidate.micro_batches(plain), abs=1)
    assert memory_by_phase.count_kept_bytes(replay) == 512 * 8 * replay.config.longest_sequence * 9
