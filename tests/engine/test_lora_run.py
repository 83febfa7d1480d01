"""`megatron-rl train` with adapters on two ranks and an engine of two, resumed by one process, and the export in PEFT's format."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from support.processes import Command
from support.train_command import TORCHRUN, finish, read_rows, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]

LORA = {
    "lora.rank": 8, "lora.targets": '["linear_qkv", "linear_proj", "linear_fc2"]', "train.learning_rate": 1e-2, "checkpoint.resume": "auto",
    "algorithm.entropy_coef": 0.01,  # a gradient, whatever the rewards of a random model
}  # fmt: skip


def test_a_run_of_adapters_is_exact_resumes_in_another_layout_and_is_exported(tmp_path):
    cut = {**LORA, "train.layout.tp": 2, "rollout.tp": 2, "train.steps": 3, "checkpoint.every": 1}
    first = finish(train(tmp_path, cut, launcher=TORCHRUN))
    assert first.code == 0, first.err
    run = (tmp_path / "runs" / "latest").resolve()
    rows = read_rows(run)
    whole, *others = [row["sync/bytes"] for row in rows]
    assert others == [others[0]] * 3 and 0 < others[0] < whole / 2, "after the first sync adapters alone are sent"
    resumed = finish(train(tmp_path, {**LORA, "train.steps": 4, "checkpoint.resume": run}))
    assert resumed.code == 0, resumed.err
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and all(row["mismatch/abs_max"] == 0 for row in rows[1:])
    output = tmp_path / "adapters"
    done = finish(Command(tmp_path, "megatron_rl", "export", "--checkpoint", run / "checkpoints" / "step_00004", "--output", output))
    assert done.code == 0, done.err
    described, tensors = json.loads((output / "adapter_config.json").read_text()), load_file(output / "adapter_model.safetensors")
    assert described["target_modules"] == ["down_proj", "k_proj", "o_proj", "q_proj", "v_proj"] and described["r"] == 8
    assert len(tensors) == 10 and all(bool(tensor.any()) for tensor in tensors.values())
    assert all(tensor.shape[0 if ".lora_A." in name else 1] == 8 for name, tensor in tensors.items())


def test_attention_of_a_model_with_experts_is_adapted_while_ranks_share_the_experts(tmp_path):
    experts = {**LORA, "lora.targets": '["linear_qkv", "linear_proj"]', "train.layout.dp": 2, "train.layout.ep": 2, "train.steps": 3}
    done = finish(train(tmp_path, experts, launcher=TORCHRUN, config="quickstart_moe"))
    assert done.code == 0, done.err
    rows = read_rows(tmp_path / "runs" / "latest")
    whole, *others = [row["sync/bytes"] for row in rows]
    assert others == [others[0]] * 3 and 0 < others[0] < whole / 4, "experts and router are frozen"
    assert all(row["mismatch/abs_max"] == 0 < row["grad_norm"] for row in rows[1:])
