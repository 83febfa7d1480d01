"""If routers replay, ranks know before a pass how many tokens go where. The counts are Megatron's, and no bit changes."""

import shutil
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from support import fp8_checkpoints, trainer
from support.models import FP8, random_sequences
from support.samples import assert_same, with_random_routing

from megatron_rl.mcore.layers.moe.experts import Dispatcher
from megatron_rl.mcore.layers.moe.router import ModelRouters
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


def train_on_records(run, known, *args):
    """Return the results of `run`, and the number of layer passes that counted tokens themselves (`free`). With `known`, replaying
    routers know the counts ahead, and the counts must be Megatron's."""
    plain, free = MoEAlltoAllTokenDispatcher.preprocess, 0
    names = ["input_splits", "output_splits", "output_splits_tp", "num_out_tokens"]

    def preprocess(self, routing_map):
        nonlocal free
        free += self.router.router_replay.find_counts() is None
        counts, of_several = plain(self, routing_map), ["num_global_tokens_per_local_expert"] if self.num_local_experts > 1 else []
        self.wanted = {"tokens_per_expert": counts} | {name: getattr(self, name) for name in names + of_several}
        of_layer(self, routing_map)

    def token_dispatch(self, *tensors):
        result = dispatch(self, *tensors)
        for name, wanted in self.wanted.items() if self.ep_size * self.tp_size > 1 else ():
            assert torch.equal(torch.as_tensor(getattr(self, name)), torch.as_tensor(wanted)), name
        return result

    of_layer, dispatch = Dispatcher.preprocess, Dispatcher.token_dispatch
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Dispatcher, "preprocess", preprocess))
        patches.enter_context(mock.patch.object(Dispatcher, "token_dispatch", token_dispatch))
        if not known:
            patches.enter_context(mock.patch.object(ModelRouters, "count_ahead", lambda _, batches: [{}] * len(batches)))
        return {"results": run(*args), "free": free}


def batches(model, layers):
    """Return three batches. In the last, one replica has the only sample, the other only padding."""
    whole = [random_sequences(7, seed=1), random_sequences(6, seed=2), random_sequences(1, seed=3)]
    return [with_random_routing(batch, *MODELS[model], layers) for batch in whole]


def compare(worlds, run, layout, *args):
    """Return the results of each rank with known routes, after comparing them with those of counted routes."""
    known, counted = (worlds(layout.world_size).call(train_on_records, run, each, *args, layout) for each in (True, False))
    for ours, theirs in zip(known, counted, strict=True):
        assert_same(ours["results"], theirs["results"])
    assert sum(rank["free"] for rank in known) < sum(rank["free"] for rank in counted)  # a stage may have no experts
    return known


@pytest.mark.default_cases(1)
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
