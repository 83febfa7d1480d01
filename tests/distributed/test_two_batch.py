"""Two interleaved micro-batches have the bits of two sequential ones: log-probs, steps, weights, gradients of all kinds of layers. So have
recomputed activations."""

import shutil

import critics
import pytest
import torch
from support import fp8_checkpoints, trainer
from support.models import FP8, FP32, random_sequences
from support.samples import assert_same, with_random_routing

from parallel.layout import Layout

BF16 = {"mode": "bf16", "high": "bf16"}
FAST = FP8 | {"reduction": "fast"}
TRAIN = {"micro_batch_tokens": 40, "adam_eps": 1e-4}
CASES = [
    (Layout(tp=2), "qwen3", FP8),
    (Layout(tp=2), "qwen2", FAST),
    (Layout(tp=2, pp=2), "qwen3", FP8),
    (Layout(dp=2, ep=2), "qwen3_moe", FP8),
    (Layout(tp=2, dp=2, ep=2, etp=1), "deepseek_v3", FP8),
    (Layout(tp=2), "qwen3_5_text", FP8),
    (Layout(cp=2), "qwen3", BF16),
    (Layout(cp=2), "qwen3_5_text", FP8),
]
LONG = [
    (Layout(tp=2, dp=2, ep=4, etp=1), "qwen3_moe", FAST),
    (Layout(dp=2, ep=2), "glm4_moe", BF16),
    (Layout(pp=2, vpp=2, tp=2), "qwen3", FP8),
    (Layout(tp=2, cp=2), "qwen3", FP8),
    (Layout(cp=2, dp=2), "qwen3", FP8),
    (Layout(cp=2, pp=2), "deepseek_v3", FP8),
    (Layout(tp=2, cp=2, ep=2, etp=1), "qwen3_moe", BF16),
    (Layout(tp=2), "glm4", FP8),
    (Layout(tp=2, dp=2, ep=2, etp=2), "qwen3_moe", FP8),
    (Layout(tp=2, ep=2, etp=1), "qwen3_next", FP8),
    (Layout(dp=2, ep=2), "qwen3_5_moe_text", BF16),
    (Layout(cp=2, pp=2, ep=2), "qwen3_next", FP8),
    (Layout(tp=2, cp=2, ep=4, etp=1), "qwen3_5_moe_text", FP8),
]


@pytest.fixture(scope="module")
def compare(worlds):
    """`compare(run, ...)` runs a function with and without interleaving, or in other `ways`, and compares its results on every rank."""

    def check(run, layout, *args, ways=({"two_batch_overlap": "all"}, {"two_batch_overlap": "off"}), **train):
        ours, theirs = (
            worlds(layout.world_size).call(run, *(TRAIN | train | way if arg is TRAIN else arg for arg in args)) for way in ways
        )
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other, {"tokens/padding"})  # virtual stages take rounds of twice as many micro-batches

    return check


def batches():
    return [random_sequences(7, seed=1), random_sequences(6, seed=2)]


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("layout, model, precision", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_turns_change_no_bit(compare, model_folder, layout, model, precision):
    folder = model_folder(model, num_hidden_layers=4 if layout.vpp > 1 else 2, tie_word_embeddings=False)
    compare(trainer.train_grpo, layout, folder, precision, TRAIN, batches(), layout)


@pytest.mark.long
def test_passes_without_gradient_take_turns_where_layers_are_recomputed(compare, model_folder):
    compare(trainer.train_grpo, Layout(tp=2), model_folder("qwen3"), FP8, TRAIN, batches(), Layout(tp=2), recompute="full")


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    "layout, model, precision, recompute",
    [
        *((Layout(tp=2), "qwen3", FP8 | {"high": high}, how) for high, how in (("fp32", "full"), ("bf16", "selective"))),
        (Layout(), "qwen3_moe", FP32, "full"),
        (Layout(tp=2), "qwen3_5_text", FP8, "full"),
        (Layout(dp=2, ep=2), "qwen3_next", BF16, "selective"),
        (Layout(dp=2, ep=2, pp=2), "qwen3_moe", FP32, "selective"),  # several micro-batches wait for their backward pass
    ],
)
def test_recomputed_activations_change_no_bit(compare, model_folder, layout, model, precision, recompute):
    """Those of experts are of the same experts, which are replayed and balanced."""
    folder, experts = model_folder(model, num_hidden_layers=2, mlp_only_layers=[]), model == "qwen3_moe"
    data, options = batches(), {"router_aux_loss": 0.5} if experts else {}
    data = [with_random_routing(batch, 4, 2) for batch in data] if experts else data
    compare(
        trainer.train_grpo,
        layout,
        folder,
        precision,
        TRAIN,
        data,
        layout,
        ways=({"recompute": recompute}, {"recompute": "none"}),
        **options,
    )


def test_adapters_have_gradients_of_their_own(compare, model_folder):
    layout, folder = Layout(tp=2, dp=2, ep=2, etp=1), model_folder("qwen3_moe", num_hidden_layers=2)
    adapters = {"rank": 8, "alpha": 16.0, "targets": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
    compare(trainer.train_adapters, layout, folder, FP8, adapters, batches(), layout, None, TRAIN)


def test_a_critic(compare, checkpoint):
    compare(critics.train_critic, Layout(tp=2), checkpoint, FP8, TRAIN, batches(), Layout(tp=2))


@pytest.mark.long
def test_layers_for_multi_token_prediction(compare, model_folder, tmp_path):
    folder = shutil.copytree(model_folder("glm4_moe_air", num_hidden_layers=2), tmp_path / "model")
    fp8_checkpoints.add_mtp_layer(folder)
    layout = Layout(tp=2, dp=2, ep=2, etp=1)
    compare(trainer.train_grpo, layout, folder, FP8, TRAIN, batches(), layout, mtp_loss_scaling_factor=0.3)


def test_a_tied_embedding_adds_its_two_gradients_in_another_order(worlds, model_folder):
    """The gradients of output layer and embedding are added after one micro-batch, or after both."""
    folder = model_folder("qwen2", num_hidden_layers=2)
    in_turns, after_another = (
        worlds(2).call(trainer.train_grpo, folder, FAST, TRAIN | {"two_batch_overlap": mode}, batches(), Layout(tp=2))[0]
        for mode in ("all", "off")
    )
    embedding = "model.embed_tokens.weight"
    torch.testing.assert_close(in_turns["masters"].pop(embedding), after_another["masters"].pop(embedding), rtol=1e-3, atol=1e-6)
    first = [result["steps"][0] for result in (in_turns, after_another)]
    assert first[0]["loss/total"] == first[1]["loss/total"] and torch.equal(in_turns["before"], after_another["before"])
