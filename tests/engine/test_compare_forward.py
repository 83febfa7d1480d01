"""tools/compare_forward.py: on the CPU tier no operator differs, and the first operator that only the engine quantizes is found."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.models import write_model
from support.processes import ROOT, one_thread_environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

DENSE = ("input_norm", "attention.qkv", "attention.q_norm", "attention.k_norm", "attention.rope.q", "attention.rope.k", "attention.core")
DENSE += ("attention.output", "post_attention_norm", "mlp.gate_up", "mlp.swiglu", "mlp.down", "mlp")
LATENT = tuple(f"attention.{op}" for op in ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "rope.q", "rope.k")) + DENSE[6:]
SPARSE = tuple(op for op in DENSE if not op.startswith("mlp.") or op == "mlp")


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "qwen3_moe"
    write_model(folder, "qwen3_moe", {"mode": "bf16", "high": "bf16"})
    return folder


def compare(folder, *options: object):
    command = [sys.executable, ROOT / "tools" / "compare_forward.py", *options, "--json", folder / "result.json"]
    done = subprocess.run(command, cwd=ROOT, env=one_thread_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), done.stdout


def assert_nothing_differs(result, layers: tuple[str, ...]) -> None:
    operators = result["operators"]
    assert list(operators) == ["embedding", *(f"layers.{number}.{op}" for number in (0, 1) for op in layers), "norm", "lm_head"]
    assert result["first_difference"] is None
    assert all(size["differing"] == size["ulps"] == size["largest"] == 0 for parts in operators.values() for size in parts.values())
    assert all(parts["answer"]["tokens"] > 100 and parts["prompt"]["tokens"] >= 12 for parts in operators.values())
    assert result["logprobs"]["tokens"] > 100 and result["logprobs"]["exact"] == 1.0


def test_no_operator_differs_in_a_dense_model_in_bf16(tmp_path):
    result, printed = compare(tmp_path, "--high", "bf16")
    assert_nothing_differs(result, DENSE)
    assert "No operator differs." in printed


def test_no_operator_differs_with_experts(tmp_path, sparse_model):
    """Uses bf16: unless both routers compute in FP32, they choose different experts."""
    result, _ = compare(tmp_path, "--model", sparse_model, "--high", "bf16")
    assert_nothing_differs(result, SPARSE)


def test_no_operator_differs_in_latent_attention(tmp_path):
    model = tmp_path / "model"
    write_model(model, "deepseek_v3", {"mode": "bf16", "high": "bf16"}, first_k_dense_replace=2)
    result, _ = compare(tmp_path, "--model", model, "--high", "bf16")
    assert_nothing_differs(result, LATENT)


def test_the_first_difference_is_what_the_engine_alone_quantizes(tmp_path):
    result, printed = compare(tmp_path, "--mode", "fp8_rollout")
    assert result["first_difference"] == "layers.0.attention.qkv"
    assert result["operators"]["layers.0.input_norm"]["answer"]["differing"] == 0
    assert result["operators"]["layers.0.attention.qkv"]["answer"]["largest"] > 1e-3
    assert "The first difference is in layers.0.attention.qkv." in printed
