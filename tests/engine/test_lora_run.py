"""`megatron-rl train` with adapters on two ranks and an engine of two, resumed by one process, and exported in PEFT's format."""

import json

import pytest
from safetensors.torch import load_file
from support.processes import ROOT, Command
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

    evaluated = tmp_path / "evaluated"
    sides = "--checkpoint", run / "checkpoints" / "step_00004", "--baseline", tmp_path / "model", "--output", evaluated
    settings = "--rollout.tp=2", "--rollout.max_new_tokens=16", "--data.eval_size=4", "--eval.samples=1"
    done = finish(Command(tmp_path, "megatron_rl", "eval", ROOT / "configs" / "quickstart_lora.toml", *sides, *settings))
    assert done.code == 0, done.err
    completions = [json.loads(line) for line in (evaluated / "completions.jsonl").read_text().splitlines()]
    texts = {side: [row["text"] for row in completions if row["side"] == side] for side in ("checkpoint", "baseline")}
    assert len(texts["checkpoint"]) == 4 and texts["checkpoint"] != texts["baseline"], "the engine has adapters, and its base has none"


OTHERS = {
    "stages and a teacher": ({"train.layout.pp": 2, "teacher.path": "model"}, 0),
    "context parallel": ({"train.layout.cp": 2}, 0),
    "sums of rounded parts": ({"train.layout.tp": 2, "rollout.tp": 2, "precision.reduction": "fast"}, 0.5),
    "blocks for the engine alone": ({"train.layout.tp": 2, "rollout.tp": 2, "precision.mode": "fp8_rollout"}, 0.5),
    "int8 for the engine alone": ({"train.layout.dp": 2, "rollout.tp": 2, "precision.mode": "int8_rollout"}, 0.5),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_layouts_and_precisions(tmp_path, case):
    changes, most = OTHERS[case]
    changes = {name: tmp_path / value if name == "teacher.path" else value for name, value in changes.items()}
    done = finish(train(tmp_path, {**LORA, "architecture.num_hidden_layers": 2, **changes}, launcher=TORCHRUN))
    assert done.code == 0, done.err
    rows = read_rows(tmp_path / "runs" / "latest")
    assert all(row["mismatch/abs_max"] <= most for row in rows[1:]) and rows[1]["grad_norm"] > 0
    whole, *others = [row["sync/bytes"] for row in rows]
    assert others == [others[0]] * 2 and 0 < others[0] < whole / 2


def test_experts_that_ranks_share_are_adapted(tmp_path):
    shared = {"train.layout.dp": 2, "train.layout.ep": 2, "rollout.tp": 2, "rollout.ep": 2}
    experts = {**LORA, **shared, "lora.targets": '["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]', "train.steps": 3}
    done = finish(train(tmp_path, experts, launcher=TORCHRUN, config="quickstart_moe"))
    assert done.code == 0, done.err
    rows = read_rows(tmp_path / "runs" / "latest")
    whole, *others = [row["sync/bytes"] for row in rows]
    assert others == [others[0]] * 3 and 0 < others[0] < whole / 2, "experts and router are frozen"
    assert all(row["mismatch/abs_max"] == 0 < row["grad_norm"] for row in rows[1:])
