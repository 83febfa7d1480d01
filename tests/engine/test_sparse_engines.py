"""Models with sparse attention in a real engine: the trainer's bits up to exactly index_topk tokens, and no token more."""

import pytest
import torch
from support import trainer_engine
from support.models import FP8
from support.processes import World

from megatron_rl.errors import RunError
from parallel.layout import Layout

TOPK = 384
BF16 = {"mode": "bf16", "high": "bf16"}
TOKENS = 24


@pytest.mark.long
@pytest.mark.parametrize(
    "family, layout, engine, precision",
    [
        ("deepseek_v32", Layout(tp=2), {}, FP8),
        pytest.param("deepseek_v32", Layout(pp=2), {"tp": 2}, BF16, marks=pytest.mark.long),
        pytest.param("glm_moe_dsa", Layout(tp=2, ep=2, etp=1), {"tp": 2}, FP8, marks=pytest.mark.long),
        pytest.param("glm_moe_dsa", Layout(dp=2, ep=2), {}, BF16, marks=pytest.mark.long),
    ],
)
def test_the_longest_sequence_is_exact_and_a_longer_one_is_refused(family, layout, engine, precision, tmp_path):
    longest = (TOPK - TOKENS,) * 3
    prompts = [[step * token % 250 for token in range(length)] for step, length in enumerate((1, 33, 70, *longest), 7)]
    with World(layout.world_size, tmp_path / "world") as world:
        world.call(trainer_engine.start_architecture, family, tmp_path, precision, layout, engine, True)
        world.call(trainer_engine.check_live)
        world.call(trainer_engine.sync, 1)
        for _ in range(2):  # then with the prompts' cache
            generated = world.call(trainer_engine.generate, prompts, TOKENS)[0]
            assert max(len(prompt) + len(response) for prompt, response in generated["samples"]) == TOPK
            assert torch.equal(generated["engine"], generated["trainer"])
        with pytest.raises(RunError, match=f"the engine refused /generate: 400 .*maximum context length of {TOPK} tokens"):
            world.call(trainer_engine.generate, prompts, TOKENS + 1)
