"""If routers replay, ranks know before a pass how many tokens go where. The counts are Megatron's, and no bit changes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from support import fp8_checkpoints, routing, trainer
from support.models import FP8, random_sequences
from support.samples import assert_same

from parallel.layout import Layout

FAST = FP8 | {"reduction": "fast"}
TRAIN = {"micro_batch_tokens": 40, "adam_eps": 1e-4}
TURNS = TRAIN | {"two_batch_overlap": "all"}
MODELS = {"qwen3_moe": (4, 2), "deepseek_v3": (8, 4), "glm4_moe": (8, 4)}
CASES = [
    (Layout(tp=2, dp=2, ep=2, etp=1), "deepseek_v3", FAST, TURNS),
    (Layout(tp=2, dp=2, ep=2, etp=2), "qwen3_moe", FP8, TURNS),
    (Layout(pp=2, vpp=2, dp=2, ep=2), "qwen3_moe", FAST, TRAIN | {"recompute": "full"}),
]
LONG = [
    (Layout(dp=2, ep=2), "qwen3_moe", FP8, TRAIN),
    (Layout(tp=2, etp=2), "qwen3_moe", FAST, TURNS),
    (Layout(cp=2, dp=2, ep=4), "qwen3_moe", FAST, TRAIN),
    (Layout(dp=2, ep=2, pp=2), "glm4_moe", FP8, TRAIN | {"recompute": "selective"}),
]


def batches(model: str, layers: int) -> list:
    """Return three batches. In the last, one replica has the only sample, the other only padding."""
    whole = [random_sequences(7, seed=1), random_sequences(6, seed=2), random_sequences(1, seed=3)]
    return [routing.with_random_routing(batch, *MODELS[model], layers) for batch in whole]


def compare(worlds, run, layout: Layout, *args: Any) -> list[dict[str, Any]]:
    """Return the results of each rank with known routes, after comparing them with those of counted routes."""
    known, counted = (worlds(layout.world_size).call(routing.train_on_records, run, each, *args, layout) for each in (True, False))
    for ours, theirs in zip(known, counted, strict=True):
        assert_same(ours["results"], theirs["results"])
    assert sum(rank["free"] for rank in known) < sum(rank["free"] for rank in counted)  # a stage may have no experts
    return known


@pytest.mark.parametrize("layout, model, precision, train", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_no_layer_counts_and_no_bit_changes(worlds, model_folder, layout, model, precision, train):
    layers = 4 if layout.vpp > 1 else 2
    folder = model_folder(model, num_hidden_layers=layers, tie_word_embeddings=False)
    for rank in compare(worlds, trainer.train_grpo, layout, folder, precision, train, batches(model, layers)):
        assert rank["free"] == 0


@pytest.mark.long
def test_layers_for_multi_token_prediction_have_no_record_and_count(worlds, model_folder, tmp_path):
    folder = shutil.copytree(model_folder("glm4_moe_air", num_hidden_layers=2), tmp_path / "model")
    fp8_checkpoints.add_mtp_layer(folder)
    layout, train = Layout(tp=2, dp=2, ep=2, etp=1), TURNS | {"mtp_loss_scaling_factor": 0.3}
    for rank in compare(worlds, trainer.train_grpo, layout, folder, FP8, train, batches("glm4_moe", 2)[:2]):
        assert rank["free"] > 0
