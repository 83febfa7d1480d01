"""Which runs promise that the engine's log-probs are the trainer's."""

from pathlib import Path

import pytest
from support.families import ENGINE_ARCHITECTURES

from megatron_rl.config import Config
from megatron_rl.precision.exactness import list_inexact


@pytest.mark.parametrize("family, sections, on_gpu, reason", [
    ("qwen3", {}, False, None),
    ("qwen3", {"rollout": {"tp": 4}, "train": {"layout": {"tp": 2}}}, False, None),
    ("deepseek_v3", {}, False, None),
    ("qwen3_moe", {"rollout": {"tp": 4, "ep": 2}, "train": {"layout": {"tp": 2, "ep": 2, "etp": 2}}}, False, None),
    ("qwen3", {"precision": {"reduction": "ranks"}}, True, None),
    ("qwen3", {"precision": {"reduction": "ranks"}, "rollout": {"sglang": {"attention_backend": "fa3"}}}, True, None),
    ("qwen3", {"precision": {"mode": "fp8_rollout"}}, False, "precision.mode = fp8_rollout: "),
    ("qwen3", {"precision": {"reduction": "fast"}}, False, None),
    ("qwen3", {"precision": {"reduction": "ranks"}, "rollout": {"tp": 2}}, False, None),
    ("qwen3", {"precision": {"reduction": "fast"}, "rollout": {"sglang": {"attention_backend": "triton"}}}, False, "rollout.sglang.atten"),
    ("qwen3", {"precision": {"reduction": "fast"}, "rollout": {"tp": 2}}, False, "tensor parallelism without "),
])  # fmt: skip
def test_a_run_is_exact_or_says_why_not(family, sections, on_gpu, reason):
    config = Config.model_validate({"model": {"path": Path("model")}, **sections})
    reasons = list_inexact(config, ENGINE_ARCHITECTURES[family], on_gpu)
    assert reasons == [] if reason is None else reasons[0].startswith(reason) and len(reasons) == 1


@pytest.mark.parametrize(("family", "operators"), [("qwen3", ["attention", "lm_head"]), ("qwen3_moe", ["attention", "lm_head", "router"])])
def test_on_gpus_each_operator_with_two_kernels_is_named(family, operators):
    config = Config.model_validate({"model": {"path": Path("model")}})
    reasons = list_inexact(config, ENGINE_ARCHITECTURES[family], True)
    assert len(reasons) == len(operators)
    assert all(reason.startswith(f"GPUs, {name}") for reason, name in zip(reasons, operators, strict=True))
