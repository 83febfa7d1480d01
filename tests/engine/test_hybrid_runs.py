"""`megatron-rl train` of models with gated delta nets: engine and trainer agree to the bit while all weights, or adapters, move."""

import pytest
from support.models import FP32, write_model
from support.train_command import TORCHRUN, finish, read_rows, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
MOVING = {
    "train.steps": 3, "train.learning_rate": 1e-3, "rollout.max_total_tokens": 4096, "rollout.chunked_prefill_size": 16,
    "algorithm.entropy_coef": 0.01,  # a gradient, whatever the rewards of a random model
}  # fmt: skip
ADAPTERS = {"lora.rank": 8, "lora.targets": '["linear_qkv", "linear_proj", "in_proj_qkvz", "out_proj"]', "train.learning_rate": 1e-2}
RUNS = {
    "every weight": ("qwen3_next", {}, ()),
    "adapters": ("qwen3_next", ADAPTERS, ()),
    "ranks": ("qwen3_5_text", {"train.layout.tp": 2, "rollout.tp": 2, "precision.kv": "e4m3", "precision.high": "bf16"}, TORCHRUN),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_stays_exact_while_weights_move(case, tmp_path):
    family, changes, launcher = RUNS[case]
    write_model(tmp_path / "model", family, FP32, num_hidden_layers=2)
    done = finish(train(tmp_path, {**MOVING, **changes}, launcher=launcher))
    assert done.code == 0, done.err
    run = (tmp_path / "runs" / "latest").resolve()
    rows = read_rows(run)
    assert [row["step"] for row in rows][-1] == 3 and all(row["mismatch/abs_max"] == 0 for row in rows if "mismatch/abs_max" in row)
    assert all(row["grad_norm"] > 0 for row in rows[1:])
