"""`locate` names the operator whose tensor is wrong in a live engine, and what is wrong with it."""

import planted_tensors
import pytest
from support import trainer_engine
from support.models import FP8
from support.processes import World
from support.trainer_engine import current

from megatron_rl.training.locate import Locator, describe
from parallel.layout import Layout


def locate(prompt=None):
    """Return the report about the live engine and trainer of this world, and its text."""
    served = current()
    trainer = served.trainer
    locator = Locator(served.config, trainer.actor, served.rank0_engines, served.plan(), trainer.collect_named_tensors, trainer.hf_config)
    report = locator.run(prompt)
    return report.run(lambda report: [report, describe(report)], list)


def flip(path, *at, bit=0, **more):
    return {"path": path, "change": "flip", "at": at, "bit": bit, **more}


LAYER = "model.layers.{}.".format
DENSE = [  # (fault, operator, cause)
    (flip(LAYER(1) + "mlp.down_proj.weight", 3, 7, bit=5), "layers.1.mlp.down", "weights"),
    (
        {"path": LAYER(0) + "self_attn.o_proj.weight_scale_inv", "change": "multiply", "at": [0, 0], "by": 2},
        "layers.0.attention.output",
        "scale of a weight",
    ),
    (flip(LAYER(0) + "mlp.gate_up_proj.weight", 5, 9, bit=6, float_copy=True), "layers.0.mlp.gate_up", "derived tensor"),
    (
        {"path": LAYER(1) + "self_attn.qkv_proj.weight", "change": "swap", "first": 0, "second": 256, "count": 128},
        "layers.1.attention.qkv",
        "weights",
    ),
    (flip(LAYER(1) + "post_attention_layernorm.weight", 3, bit=5), "layers.1.post_attention_norm", "weights"),
    (flip(LAYER(0) + "self_attn.k_norm.weight", 3, bit=5), "layers.0.attention.k_norm", "weights"),
    (flip("model.norm.weight", 3, bit=5), "norm", "weights"),
    (flip("lm_head.weight", 77, 5, bit=5), "lm_head", "weights"),
    (flip("model.embed_tokens.weight", 17, 5, bit=5), "embedding", "weights"),
    ({"path": "cache", "layer": 1, "by": 2.0}, "layers.1.attention.core", "KV cache"),
]


@pytest.mark.parametrize("kind, precision, layout, rollout, faults", [pytest.param("qwen3", FP8, Layout(), {}, DENSE)])
def test_the_operator_with_a_wrong_tensor_is_named(kind, precision, layout, rollout, faults, tmp_path):
    file = tmp_path / "fault"
    with World(layout.world_size, tmp_path / "world") as world:
        world.call(planted_tensors.launch_planted, file)
        world.call(trainer_engine.start_architecture, kind, tmp_path, precision, layout, rollout, True)
        world.call(trainer_engine.sync, 0)
        report, text = world.call(locate)[0]
        assert report["operator"] is None, text
        wrong = []
        for fault, operator, cause in faults:
            planted_tensors.set_fault(file, fault)
            report, text = world.call(locate)[0]
            print("\n".join([str(fault), *text]))
            if (report["operator"], report["cause"]) != (operator, cause):
                wrong.append((fault, report["operator"], report["cause"]))
        assert not wrong
