"""The absorbed form of latent attention computes what Megatron's own, the expanded one, computes: log-probs and gradients."""

from __future__ import annotations

import pytest
from support import trainer
from support.models import FP8, FP32, random_sequences

from parallel.layout import Layout


@pytest.mark.parametrize(
    "kind, precision, layout",
    [
        ("deepseek_v3", FP32, Layout()),
        pytest.param("deepseek_v3", FP8, Layout(), marks=pytest.mark.long),
        pytest.param("deepseek_direct_q", FP32, Layout(), marks=pytest.mark.long),
        pytest.param("deepseek_v3", FP32, Layout(tp=2), marks=pytest.mark.long),
    ],
)
def test_both_forms_have_the_same_logprobs_and_gradients(worlds, model_folder, kind, precision, layout):
    folder = model_folder(kind, num_hidden_layers=2)
    (absorbed, gradients), (expanded, wanted) = worlds(layout.world_size).call(
        trainer.forms_of_attention, folder, precision, random_sequences(5, seed=1), layout
    )[0]
    bound = 1e-5 if precision is FP32 else 0.1  # in FP8 the order of sums moves single activations to the next E4M3 number
    assert (absorbed - expanded).abs().max() < bound and absorbed.std() > 0.1
    for name, gradient in gradients.items():
        assert (gradient - wanted[name]).norm() <= bound * wanted[name].norm(), name
        assert wanted[name].norm() > 0, name


@pytest.mark.long
def test_without_sequence_parallelism_gradients_are_those_of_one_process(worlds, model_folder):
    folder = model_folder("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2)  # Megatron demands it for experts
    batches = [random_sequences(7, seed=1), random_sequences(5, seed=2)]
    plain = {"micro_batch_tokens": 60, "adam_eps": 1e-4, "layout": {"sequence_parallel": False}}
    alone, result = (worlds(tp).call(trainer.train_grpo, folder, FP32, plain, batches, Layout(tp=tp, etp=1))[0] for tp in (1, 2))
    for step, wanted in zip(result["steps"], alone["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert (result["after"] - alone["after"]).abs().max() < 1e-4 * alone["after"].std()
