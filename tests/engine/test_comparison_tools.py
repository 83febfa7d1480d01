"""tools/compare_forward.py finds what only the engine quantizes; tools/exactness.py reports that promised cells are 0."""

import json

import pytest
from support.models import write_model
from support.processes import run_tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
DENSE = ("input_norm", "attention.qkv", "attention.q_norm", "attention.k_norm", "attention.rope.q", "attention.rope.k", "attention.core")
DENSE += ("attention.output", "post_attention_norm", "mlp.gate_up", "mlp.swiglu", "mlp.down", "mlp")
LATENT = tuple(f"attention.{op}" for op in ("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "rope.q", "rope.k")) + DENSE[6:]
SPARSE = tuple(op for op in DENSE if not op.startswith("mlp.") or op == "mlp")


def compare(folder, *options):
    done = run_tool("compare_forward", *options, "--json", folder / "result.json")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), done.stdout


@pytest.mark.parametrize(
    "family, changes, layers", [("", {}, DENSE), ("qwen3_moe", {}, SPARSE), ("deepseek_v3", {"first_k_dense_replace": 2}, LATENT)]
)
def test_no_operator_differs_in_bf16(family, changes, layers, tmp_path):
    """Unless both routers compute in FP32, they choose different experts."""
    model = tmp_path / "model"
    if family:
        write_model(model, family, {"mode": "bf16", "high": "bf16"}, **changes)
    result, printed = compare(tmp_path, *(("--model", model) if family else ()), "--high", "bf16")
    operators = result["operators"]
    assert list(operators) == ["embedding", *(f"layers.{number}.{op}" for number in (0, 1) for op in layers), "norm", "lm_head"]
    assert result["first_difference"] is None
    assert all(size["differing"] == size["ulps"] == size["largest"] == 0 for parts in operators.values() for size in parts.values())
    assert all(parts["answer"]["tokens"] > 100 and parts["prompt"]["tokens"] >= 12 for parts in operators.values())
    assert result["logprobs"]["tokens"] > 100 and result["logprobs"]["exact"] == 1.0
    assert "No operator differs." in printed


def test_the_first_difference_is_what_the_engine_alone_quantizes(tmp_path):
    result, printed = compare(tmp_path, "--mode", "fp8_rollout")
    assert result["first_difference"] == "layers.0.attention.qkv"
    assert result["operators"]["layers.0.input_norm"]["answer"]["differing"] == 0
    assert result["operators"]["layers.0.attention.qkv"]["answer"]["largest"] > 1e-3
    assert "The first difference is in layers.0.attention.qkv." in printed


def test_every_cell_of_some_layouts_is_zero(tmp_path):
    layouts = ["--train-tp", "1,2", "--pp", "1", "--cp", "2", "--ep", "1,2", "--rollout-tp", "2", "--rollout-ep", "1,2"]
    choice = ["--families", "qwen2,deepseek_v3", "--modes", "fp8,fp8_kv", "--json", str(tmp_path / "cells.json")]
    done = run_tool("exactness", *layouts, *choice, seconds=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "cells.json").read_text())
    assert len(cells) == 2 * (2 * 1 + 4 * 2) and all(cell["largest"] == 0 and cell["tokens"] > 2000 for cell in cells)
    assert f"{len(cells)} of {len(cells)} promised cells are exactly 0" in done.stdout


def test_an_unknown_family_is_one_line(tmp_path):
    done = run_tool("exactness", "--families", "mamba", seconds=300)
    assert done.returncode == 2 and "--families = 'mamba': must be some of llama, " in done.stderr
