"""`locate` names the operator whose tensor is wrong in a live engine, and what is wrong with it."""

import math
from itertools import chain, count
from unittest import mock

import planted_tensors
import pytest
from support import trainer_engine
from support.models import FP8
from support.processes import World
from support.trainer_engine import current

from megatron_rl.diagnosis import locate as locate_module
from megatron_rl.diagnosis.locate import Locator, describe
from parallel.layout import Layout

unused_tokens = count(8)


def locate(prompt=()):
    """Return the report about the live engine and trainer of this world, and its text. Each call that draws a token draws 7 first, so the
    prefix cache has keys and values of the first fault for it."""
    served = current()
    trainer = served.trainer
    locator = Locator(served.config, trainer.actor, served.rank0_engines, served.plan(), trainer.collect_named_tensors, trainer.hf_config)
    with mock.patch.object(locate_module, "draw_token", side_effect=chain([7], unused_tokens)):
        found = locator.run(prompt)
    return found.run(lambda report: [report, describe(report)], list)


def flip(path, *at, bit=0, **more):
    return {"path": path, "change": "flip", "at": at, "bit": bit, **more}


def multiply(path, *at, by=2.0, **more):
    return {"path": path, "change": "multiply", "at": at, "by": by, **more}


def swap(path, first, second, count=1):
    return {"path": path, "change": "swap", "first": first, "second": second, "count": count}


L0, L1 = "model.layers.0.", "model.layers.1."
DENSE = {  # fault: (operator, cause)
    "k norm": (flip(L0 + "self_attn.k_norm.weight", 3, bit=5), "layers.0.attention.k_norm", "weights"),
    "a bit of a block": (flip(L1 + "mlp.down_proj.weight", 3, 7, bit=5), "layers.1.mlp.down", "weights"),
    "scale": (multiply(L0 + "self_attn.o_proj.weight_scale_inv", 0, 0), "layers.0.attention.output", "scale of a weight"),
    "float copy": (flip(L0 + "mlp.gate_up_proj.weight", 5, 9, bit=6, float_copy=True), "layers.0.mlp.gate_up", "derived tensor"),
    "q and k rows": (swap(L1 + "self_attn.qkv_proj.weight", 0, 256, 128), "layers.1.attention.qkv", "weights"),
    "layer norm": (flip(L1 + "post_attention_layernorm.weight", 3, bit=5), "layers.1.post_attention_norm", "weights"),
    "last norm": (flip("model.norm.weight", 3, bit=5), "norm", "weights"),
    "a row of lm_head": (flip("lm_head.weight", 77, 5, bit=5), "lm_head", "weights"),
    "a row of the embedding": (flip("model.embed_tokens.weight", 17, 5, bit=5), "embedding", "weights"),
    "cache": ({"path": "cache", "layer": 1}, "layers.1.attention.core", "KV cache"),
    "not finite": (multiply(L1 + "mlp.down_proj.weight_scale_inv", 0, 0, by=math.nan), "layers.1.mlp.down", "scale of a weight"),
    "an operator that is not finite": ({"path": "operator", "module": L1 + "mlp.down_proj"}, "layers.1.mlp.down", "not finite"),
}
EXPERTS = {
    "experts exchanged": (
        swap(f"{L1}mlp.experts.w13_weight+{L1}mlp.experts.w13_weight_scale_inv+{L1}mlp.experts.w2_weight", 0, 1),
        "layers.1.mlp.experts.gate_up",
        "weights",
    ),
    "scale of an expert": (multiply(L0 + "mlp.experts.w2_weight_scale_inv", 3, 0, 0), "layers.0.mlp.experts.down", "scale of a weight"),
    "router": (flip(L0 + "mlp.gate.weight", 2, 9, bit=5), "layers.0.mlp.router", "weights"),
    "q norm": (flip(L1 + "self_attn.q_norm.weight", 0, bit=5), "layers.1.attention.q_norm", "weights"),
    "routing weights": ({"path": "operator", "module": L1 + "mlp.topk"}, "layers.1.mlp.router", "kernel"),
}
LATENT = {
    "w_kc": (multiply(L0 + "self_attn.w_kc", 0, 3, 5, by=-1.0), "layers.0.attention.kv_b.k", "derived tensor"),
    "w_vc": (multiply(L1 + "self_attn.w_vc", 1, 3, 5, by=-1.0), "layers.1.attention.kv_b.v", "derived tensor"),
    "kv_b without its copies": (flip(L0 + "self_attn.kv_b_proj.weight", 3, 7, bit=5), "layers.0.attention.kv_b.k", "weights"),
    "latent norm": (flip(L1 + "self_attn.kv_a_layernorm.weight", 3, bit=5), "layers.1.attention.kv_a_norm", "weights"),
    "q latents": (flip(L0 + "self_attn.fused_qkv_a_proj_with_mqa.weight", 3, 7, bit=5), "layers.0.attention.q_a", "weights"),
    "kv latents": (flip(L0 + "self_attn.fused_qkv_a_proj_with_mqa.weight", 131, 7, bit=5), "layers.0.attention.kv_a", "weights"),
    "router bias": (multiply(L1 + "mlp.gate.e_score_correction_bias", 0, by=-9.0), "layers.1.mlp.router", "weights"),
    "shared expert": (flip(L1 + "mlp.shared_experts.down_proj.weight", 3, 7, bit=5), "layers.1.mlp.shared_experts.down", "weights"),
    "cache": ({"path": "cache", "layer": 0}, "layers.0.attention.core", "KV cache"),
}


SHARDED = {
    "a bit on the second rank": (flip(L1 + "mlp.gate_up_proj.weight", 200, 7, bit=5, rank=1), "layers.1.mlp.gate_up", "weights"),
    "columns of the second rank": (flip(L0 + "self_attn.o_proj.weight", 3, 7, bit=5, rank=1), "layers.0.attention.output", "weights"),
    "keys of the second rank": (flip(L0 + "self_attn.qkv_proj.weight", 130, 7, bit=5, rank=1), "layers.0.attention.qkv", "weights"),
    "norm on the second rank": (flip(L0 + "input_layernorm.weight", 3, bit=5, rank=1), "layers.0.input_norm", "weights"),
    "a row of lm_head": (flip("lm_head.weight", 7, 5, bit=5, rank=1), "lm_head", "weights"),
}
SHARDED_EXPERTS = {
    "keys of the second rank": SHARDED["keys of the second rank"],
    "an expert": (multiply(L1 + "mlp.experts.w13_weight_scale_inv", 5, 1, 0, rank=1), "layers.1.mlp.experts.gate_up", "scale of a weight"),
    "router": (flip(L0 + "mlp.gate.weight", 2, 9, bit=5, rank=0), "layers.0.mlp.router", "weights"),
}
CACHE = {
    "KV scale": (multiply(L1 + "self_attn.attn.kv_scales", 0), "layers.1.attention.core", "KV scale"),
    "cache": ({"path": "cache", "layer": 0}, "layers.0.attention.core", "KV cache"),
}
HYBRID = {
    "values of the delta net": (flip(L0 + "linear_attn.in_proj_qkvz.weight", 600, 7, bit=5), "layers.0.attention.qkvz", "weights"),
    "gates of the delta net": (flip(L0 + "linear_attn.in_proj_ba.weight", 3, 7, bit=5), "layers.0.attention.ba", "weights"),
    "a tap": (multiply(L0 + "linear_attn.conv1d.weight", 300, 0, 2, by=-1.0), "layers.0.attention.conv", "weights"),
    "decay": (multiply(L0 + "linear_attn.A_log", 2, by=-3.0), "layers.0.attention.delta", "weights"),
    "gated norm": (flip(L0 + "linear_attn.norm.weight", 3, bit=5), "layers.0.attention.gate_norm", "weights"),
    "output of the delta net": (
        multiply(L0 + "linear_attn.out_proj.weight_scale_inv", 0, 0),
        "layers.0.attention.output",
        "scale of a weight",
    ),
    "a gate of attention": (flip(L1 + "qkv_proj.weight", 130, 7, bit=5), "layers.1.attention.qkv", "weights"),
    "one plus a norm": (multiply(L1 + "input_layernorm.gemma_weight", 3), "layers.1.input_norm", "derived tensor"),
}
COARSE = {name: DENSE[name] for name in ("scale", "q and k rows", "a bit of a block", "a row of the embedding", "layer norm")}
FAST = {"mode": "fp8_unified", "high": "bf16", "reduction": "fast"}
SUMS = (".attention.output", ".mlp.down", ".mlp")  # of which an engine rank holds only a part if their order is not fixed
LONG = [
    ("qwen3_moe", FP8, Layout(), {}, EXPERTS),
    ("deepseek_v3", FP8, Layout(), {}, LATENT),
    ("qwen3", FP8, Layout(pp=2), {"tp": 2}, SHARDED),
    ("qwen3_moe", FP8, Layout(tp=2, ep=2, etp=1), {"tp": 2}, SHARDED_EXPERTS),
    ("qwen3", FP8 | {"kv": "e4m3_per_layer"}, Layout(), {}, CACHE),
    ("qwen3_5_text", FP8, Layout(), {}, HYBRID),
    ("qwen3", FAST, Layout(), {"tp": 2}, COARSE),
    ("qwen3", {"mode": "fp8_rollout", "high": "fp32"}, Layout(), {}, COARSE),
]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "kind, precision, layout, rollout, faults",
    [("qwen3", FP8, Layout(), {}, DENSE), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_the_operator_with_a_wrong_tensor_is_named(kind, precision, layout, rollout, faults, tmp_path):
    file = tmp_path / "fault"
    with World(layout.world_size, tmp_path / "world") as world:
        world.call(planted_tensors.launch_planted, file)
        world.call(trainer_engine.start_architecture, kind, tmp_path, precision, layout, rollout, True)
        world.call(trainer_engine.sync, 0)
        report, text = world.call(locate)[0]
        assert report["operator"] is None and report["first"] is None, text
        assert report["bitwise"] == (precision is not FAST)
        assert [op for op in report["not_compared"] if precision is not FAST or not op.endswith(SUMS)] == []
        wrong = {}
        for name, (fault, operator, cause) in faults.items():
            planted_tensors.set_fault(file, fault)
            report, text = world.call(locate)[0]
            if (report["operator"], report["cause"]) != (operator, cause):
                wrong[name] = text
        assert wrong == {}
