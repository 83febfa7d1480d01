"""`megatron-rl train` of gpt-oss: whole runs, and those of adapters, are exact, go on in any layout, and are exported."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.models import FP32, read_weights, write_model
from support.train_command import TORCHRUN, finish, latest, read_numbers, read_rows, train
from transformers import AutoModelForCausalLM

from megatron_rl.mcore.checkpoint.export import export_checkpoint

pytestmark = pytest.mark.timeout(6000)
BF16 = {"mode": "bf16", "high": "bf16"}
MOVING = {
    "precision.mode": "bf16", "train.learning_rate": 1e-2, "checkpoint.every": 1, "checkpoint.resume": "auto",
    "algorithm.entropy_coef": 0.01,  # a gradient, whatever the rewards of a random model
    "rollout.max_new_tokens": 24,  # with its prompt longer than the window of 9 tokens
}  # fmt: skip
SHARED = {"train.layout.tp": 2, "train.layout.ep": 2, "train.layout.etp": 1, "rollout.tp": 2, "rollout.ep": 2}
ADAPTERS = {"lora.rank": 8, "lora.targets": '["linear_qkv", "linear_proj"]'}


def run(folder, changes=None, *, ranks=2):
    """Train, and return the rows. All sampled tokens have the trainer's log-probs, to the bit, and all weights are proved."""
    done = finish(train(folder, {**MOVING, **(changes or {})}, launcher=TORCHRUN if ranks > 1 else ()))
    assert done.code == 0, done.err
    rows = read_rows(latest(folder))
    assert all(row["mismatch/abs_max"] == 0 < row["grad_norm"] for row in rows[1:])
    assert all(row["sync/proved"] == row["sync/tensors"] > 0 for row in rows)
    return rows


def export(folder, step, output):
    """Export a step's checkpoint of the newest run in BF16."""
    export_checkpoint(latest(folder) / "checkpoints" / f"step_{step:05d}", output, "bf16")
    return output


@pytest.mark.long
def test_a_run_is_exact_and_its_export_is_a_checkpoint_of_gpt_oss(tmp_path):
    write_model(tmp_path / "model", "gpt_oss", FP32)
    rows = run(tmp_path, ranks=1)
    assert [row["step"] for row in rows] == [0, 1, 2]
    exported = export(tmp_path, 2, tmp_path / "exported")
    before, after = read_weights(tmp_path / "model"), read_weights(exported)
    assert before.keys() == after.keys() and len(after) == 2 * 17 + 3
    assert {name: tensor.shape for name, tensor in before.items()} == {name: tensor.shape for name, tensor in after.items()}
    assert [name for name, tensor in before.items() if torch.equal(tensor.bfloat16(), after[name])] == [], "every weight has moved"
    _, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_and_in_another_layout(tmp_path):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    shared = {**SHARED, "precision.high": "bf16"}
    for folder, steps in ((straight, 4), (stopped, 2), (stopped, 4)):  # the last one goes on
        if not folder.exists():
            write_model(folder / "model", "gpt_oss", BF16)
        run(folder, {**shared, "train.steps": steps})
    assert read_numbers(latest(straight)) == read_numbers(latest(stopped)) and len(read_rows(latest(stopped))) == 5
    one, other = (read_weights(export(folder, 4, folder / "exported")) for folder in (straight, stopped))
    assert one.keys() == other.keys() and [name for name in one if not torch.equal(one[name], other[name])] == []

    longer = {"precision.high": "bf16", "train.steps": 5}
    for folder, layout, ranks in ((straight, {"train.layout.pp": 2, "rollout.tp": 2}, 2), (stopped, {}, 1)):
        rows = run(folder, {**longer, **layout, "checkpoint.resume": latest(folder).resolve()}, ranks=ranks)
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]


@pytest.mark.long
def test_adapters_of_attention_are_exact_go_on_in_another_layout_and_are_exported(tmp_path):
    write_model(tmp_path / "model", "gpt_oss", FP32)
    rows = run(tmp_path, {**ADAPTERS, **SHARED})
    whole, *others = [row["sync/bytes"] for row in rows]
    assert others == [others[0]] * 2 and 0 < others[0] < whole / 2, "after the first sync adapters alone are sent"
    rows = run(tmp_path, {**ADAPTERS, "train.steps": 3, "checkpoint.resume": latest(tmp_path).resolve()}, ranks=1)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    output = export(tmp_path, 3, tmp_path / "adapters")
    described, tensors = json.loads((output / "adapter_config.json").read_text()), load_file(output / "adapter_model.safetensors")
    assert described["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(tensors) == 2 * 2 * 4 and all(bool(tensor.any()) for tensor in tensors.values())
