"""Which operators are suspected for a result that differs, and which cause is named."""

import pytest
import torch

from megatron_rl.diagnosis.causes import Finding, describe_stale, diagnose, find_operators, find_other_precision, find_suspects
from megatron_rl.diagnosis.walk import LOGPROBS, NOISE_MARGIN, Element, Walk, compare
from megatron_rl.precision.graph.decoder import LayerPrecision, Operator, decoder_graph
from megatron_rl.precision.graph.graph import TensorPrecision
from megatron_rl.precision.sketch import RecordedTensor, Sketch

BF16, FP32 = TensorPrecision("bf16"), TensorPrecision("fp32")
PLAIN = Operator({"x": BF16, "weight": BF16})
DENSE = ("input_norm", "attention.qkv", "attention.output", "post_attention_norm", "mlp.gate_up", "mlp.down")
MOE = (*DENSE[:4], "mlp.router", "mlp.experts.gate_up", "mlp.experts.down", "mlp.shared_experts.gate_up", "mlp.shared_experts.down")
LATENT = ("input_norm", "attention.q_b", "attention.kv_a", "attention.kv_a_norm", "attention.kv_b.k", "attention.kv_b.v", *DENSE[2:])


def make_graph(x=BF16):
    def layer(names, logits=None):
        return LayerPrecision({name: PLAIN.with_inputs(x=x if name == "mlp.down" else BF16) for name in names}, BF16, BF16, "core", logits)

    layers = {0: layer(DENSE), 1: layer(MOE, FP32), 2: layer(LATENT)}
    ends = {"embedding": Operator({"weight": BF16}), "norm": PLAIN, "lm_head": PLAIN, "logprobs": Operator({"x": BF16})}
    return decoder_graph(BF16, layers, ends)


@pytest.mark.parametrize(
    "tensor, operators",
    [
        ("model.layers.3.self_attn.qkv_proj.weight_scale_inv", ("layers.3.attention.qkv",)),
        ("model.layers.10.mlp.experts.w13_weight", ("layers.10.mlp.experts.gate_up",)),
        ("model.layers.0.mlp.gate.e_score_correction_bias", ("layers.0.mlp.router",)),
        ("model.layers.0.mlp.gate_up_proj.weight", ("layers.0.mlp.gate_up",)),
        ("model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight", ("layers.0.attention.q_a", "layers.0.attention.kv_a")),
        ("model.layers.0.self_attn.attn.kv_scales", ("layers.0.attention.core",)),
        ("model.layers.0.self_attn.w_kc", ("layers.0.attention.kv_b.k",)),
        ("model.layers.1.post_attention_layernorm.weight", ("layers.1.post_attention_norm",)),
        ("model.norm.weight", ("norm",)),
        ("lm_head.weight", ("lm_head",)),
        ("something.else", ("something.else",)),
    ],
)
def test_a_tensor_of_the_engine_belongs_to_an_operator(tensor, operators):
    assert find_operators(tensor) == operators


@pytest.mark.parametrize(
    "op, equal, suspects",
    [
        ("layers.0.attention.qkv", ["layers.0.input_norm"], ["layers.0.attention.qkv"]),
        (
            "layers.0.attention.core",
            ["layers.0.attention.qkv", "layers.0.attention.rope.q", "layers.0.attention.rope.k"],
            ["layers.0.attention.core"],
        ),
        ("layers.1.input", ["layers.0.mlp", "layers.0.attention.residual"], ["layers.0.mlp.residual"]),
        (
            "layers.1.mlp",
            ["layers.1.post_attention_norm", "layers.1.mlp.router", "layers.1.mlp.shared_experts.down"],
            ["layers.1.mlp.experts.gate_up", "layers.1.mlp.experts.swiglu", "layers.1.mlp.experts.down", "layers.1.mlp.experts.sum"],
        ),
        (
            "layers.2.attention.rope.q",
            ["layers.2.attention.q_b", "layers.2.attention.kv_a_norm"],
            ["layers.2.attention.rope", "layers.2.attention.kv_b.k"],
        ),
        ("norm", ["norm.input"], ["norm"]),
        (LOGPROBS, ["lm_head"], ["logprobs"]),
    ],
)
def test_what_lies_between_equal_results_and_the_first_different_one_is_suspected(op, equal, suspects):
    assert sorted(find_suspects(make_graph(), op, equal)) == sorted(suspects)


def make_recording(**rows):
    def sketch(x):
        return Sketch.of(torch.tensor(x, dtype=torch.float32)[:, None].repeat(1, 8), torch.arange(8))

    return {op.replace("_", "."): RecordedTensor("bf16", sketch(x)) for op, x in rows.items()}


def make_walk(differing, uncomputed=0, op="layers.0.attention.core"):
    before = [1.0, 2.0, 3.0, 4.0]
    after = [value + (0.5 if row in differing else 0.0) for row, value in enumerate(before)]
    own, other = (
        {"layers.0.attention.qkv": 0, "layers.0.attention.rope.q": 0, "layers.0.attention.rope.k": 0, op: rows} for rows in (before, after)
    )
    recordings = [{name: make_recording(x=before if rows == 0 else rows)["x"] for name, rows in side.items()} for side in (own, other)]
    return Walk([5, 6, 7, 8, 9], 2, compare(*recordings, None)[0], [], uncomputed)


def test_the_first_suspect_with_a_finding_is_named_and_else_the_kind_of_difference():
    graph, wrong = make_graph(), Finding(("layers.0.attention.core",), "KV scale", "kv_scales of engine rank 0 is not ...")
    later = Finding(("layers.2.mlp.down",), "weights", "a weight")
    found = diagnose(make_walk({1, 2}), None, graph, [later, wrong])
    assert (found.operator, found.cause, found.others) == ("layers.0.attention.core", "KV scale", ["a weight"])
    assert diagnose(make_walk({2, 3}), None, graph, []).cause == "KV cache", "only decoded tokens differ"
    assert diagnose(make_walk({1, 2, 3}), None, graph, []).cause == "kernel"
    assert diagnose(make_walk({1, 2, 3}, uncomputed=1), None, graph, []).cause == "KV cache"
    small, large = (Element(8, 1, 0, 1.0, 1.0, 1e-7, ulps) for ulps in (2.0, 1e5))
    causes = [diagnose(make_walk({0}, op="layers.0.attention.output"), each, graph, []).cause for each in (small, large)]
    assert causes == ["order of a sum", "kernel"]
    assert diagnose(make_walk({0}, op=LOGPROBS), None, graph, []).cause == "sampling"
    unreached = diagnose(make_walk(set()), None, graph, [later])
    assert unreached.operator == "layers.2.mlp.down" and "no result of this prompt shows it" in unreached.text
    unknown = diagnose(make_walk(set()), None, graph, [Finding(find_operators("other.weight"), "weights", "other.weight is wrong")])
    assert unknown.operator == "other.weight", "what no operator uses is not lost"
    assert diagnose(make_walk(set()), None, graph, []) is None


def test_other_formats_and_stale_tensors_are_findings():
    pow2, plain = (TensorPrecision("e4m3", "1x128", scale) for scale in ("pow2", "fp32"))
    first, *_ = findings = find_other_precision(make_graph(pow2), [make_graph(plain)])
    assert [each.operators for each in findings] == [("layers.0.mlp.down",), ("layers.2.mlp.down",)]
    assert first.cause == "activation scale" and "e4m3 1x128 fp32 in the engine, as e4m3 1x128 pow2 in the trainer" in first.text
    (stale,) = describe_stale([{}, {"model.layers.2.self_attn.w_vc": "3 of its 9 values are stale"}])
    assert stale.operators == ("layers.2.attention.kv_b.v",) and "of engine rank 1: 3 of" in stale.text


def test_a_difference_counts_above_the_noise_floor_where_bits_are_not_promised():
    own, near, far = make_recording(op=[1.0, 2.0]), make_recording(op=[1.001, 2.0]), make_recording(op=[1.0, 2.1])
    noisy = make_recording(op=[1.0, 2.001])
    floor = compare(own, near, noisy)[0][0].floor
    assert 1e-4 < floor < 1e-3 and compare(own, near, None)[0][0].differing == [0]
    assert compare(own, near, noisy)[0][0].differing == [] and compare(own, far, noisy)[0][0].differing == [1]
    assert compare(own, far, noisy)[0][0].distance > NOISE_MARGIN * floor
    compared, left_out = compare(own | make_recording(only_here=[1.0, 1.0]), own | make_recording(only_there=[1.0, 1.0]), None)
    assert [each.op for each in compared] == ["op"] and left_out == ["only.there", "only.here"]
