"""Training of adapters alone: their gradients, frozen weights, and the same results in any layout."""

import pytest
import torch
from support import trainer
from support.families import ARCHITECTURES
from support.fp8_checkpoints import add_mtp_layer
from support.models import FP8, FP32, make_model, random_sequences
from support.trainer import Trainer, compute_logprobs

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.config.lora import LoraConfig
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.run_weights import read_state
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.weights.adapters import list_adapted_layers
from megatron_rl.mcore.weights.cache_scales import collect_scales
from parallel.adapters import NAMES
from parallel.layout import Layout

LORA = {"rank": 8, "alpha": 16.0}
PARTS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def score_checkpoint(folder, precision, lora, batch, layout, checkpoint):
    """Return the log-probs of a batch with a checkpoint's adapters, whatever layout wrote it."""
    loaded = Trainer(folder, precision, layout=layout, lora=LoraConfig(**lora))
    load_run_checkpoint(checkpoint, loaded.model, loaded.actor.optimizer, read_state(checkpoint, of_adapters=True)[0], same_layout=False)
    return torch.cat(compute_logprobs(loaded.actor, batch)[0])


def restore_cache_scales(folder, lora, to):
    """Return the scales of the KV cache of a trainer with adapters, and of another one that loads its checkpoint."""
    saving, loading = (Trainer(folder, FP32 | {"kv": "e4m3_per_layer"}, lora=LoraConfig(**lora)) for _ in range(2))
    for number, scales in enumerate(collect_scales(saving.model).values(), 1):
        scales.copy_(torch.tensor([2.0**-number, 2.0**number]))
    saving.save(to, with_optimizer=True, lora=lora, base=str(folder))
    load_run_checkpoint(to, loading.model, loading.actor.optimizer, read_state(to, of_adapters=True)[0], same_layout=False)
    return collect_scales(saving.model), collect_scales(loading.model)


def measure_adapter_gradient(folder, precision, lora, batch):
    """Return |g|^2 of the adapters' gradient of the mean loss, and the slope of the loss along g by finite differences. B is nonzero."""
    trained = Trainer(folder, precision, {"learning_rate": 1e-12, "clip_grad": 0.0}, lora=LoraConfig(**lora))
    parameters = [getattr(layer, each) for _, _, layer in list_adapted_layers(trained.model) for each in NAMES]
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    own, actor = select_own(batch), trained.actor
    actor.update(own, negative_log_likelihood)
    gradients = [parameter.main_grad.clone() for parameter in parameters]
    square = sum(float(gradient.double().square().sum()) for gradient in gradients)

    def loss_at(step):
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += step * gradient
            loss = -torch.cat(actor.compute_logprobs(own)[0]).double().mean().item()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= step * gradient
        return loss

    step = 1e-2 / square**0.5
    return square, (loss_at(step) - loss_at(-step)) / (2 * step)


def test_gradient_is_the_slope_of_the_loss(worlds, checkpoint):
    ((square, slope),) = worlds(1).call(measure_adapter_gradient, checkpoint, FP32, LORA, random_sequences(4, 1))
    assert square > 1e-6 and slope == pytest.approx(square, rel=0.02)


def test_a_checkpoint_of_adapters_holds_the_scales_of_the_cache(worlds, checkpoint, tmp_path):
    ((saved, loaded),) = worlds(1).call(restore_cache_scales, checkpoint, LORA, tmp_path / "run")
    assert len(saved) == 2 and saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], scales) for name, scales in saved.items())


ATTENTION, FC = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
FAST = FP32 | {"reduction": "fast"}
CASES = {
    "tp": ("dense", Layout(tp=2), FP32),
    "tp, fp8": ("dense", Layout(tp=2), FP8),
    "ep": ("qwen3_moe", Layout(dp=2, ep=2), FP32),
    "ep, not etp": ("qwen3_moe", Layout(tp=2, ep=2, etp=1), FP32),
    "etp": ("qwen3_moe", Layout(tp=2, etp=2), FP32),
    "replicas of experts": ("qwen3_moe", Layout(tp=2, etp=1), FP32),
    "pp": ("qwen3_moe", Layout(pp=2, vpp=2), FP32),
    "cp": ("qwen3_moe", Layout(cp=2), FP32),
    "latent attention": ("deepseek_v3", Layout(tp=2, ep=2, etp=1), FP32),
    "norms behind layers": ("glm4", Layout(tp=2), FP32),
    "sums of rounded parts": ("qwen3_moe", Layout(tp=2, etp=2), FAST),
    "pp, cp and ep": ("qwen3_moe", Layout(pp=2, cp=2, ep=2), FP32),
    "gated delta nets": ("qwen3_5_text", Layout(tp=2), FP32),
    "grouped by key head": ("qwen3_next", Layout(tp=2, ep=2, etp=1), FP32),
}
_LONG = ("replicas of experts", "pp, cp and ep")


def targets(model):
    delta_nets = ("in_proj_qkvz", "out_proj") if model in ("qwen3_5_text", "qwen3_next") else ()
    return LORA | {"targets": ATTENTION[model == "deepseek_v3" :] + delta_nets + FC}


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in _LONG)) for case in CASES])
def test_every_layout_learns_what_one_process_does_and_has_its_bits(worlds, alone, checkpoint, model_folder, tmp_path, case):
    model, layout, precision = CASES[case]
    folder, batches = checkpoint if model == "dense" else model_folder(model), [random_sequences(4, 1), random_sequences(6, 2)]
    one = alone(trainer.train_adapters, folder, FP32 if precision is FAST else precision, targets(model), batches, Layout())
    exact, tolerance = precision is not FAST, 5e-2 if precision is FP8 else 1e-3
    first, *others = worlds(layout.world_size).call(
        trainer.train_adapters, folder, precision, targets(model), batches, layout, run := tmp_path / "run"
    )
    assert torch.equal(one["start"], first["start"]) is exact
    assert one["stepped"] == set().union(*(each["changed"] for each in (first, *others)))
    moved = (one["trained"] - one["start"]).norm()
    assert (one["trained"] - first["trained"]).norm() < tolerance * moved
    for step, same in zip(one["steps"], first["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(same["grad_norm"], rel=tolerance if precision is FP8 else 1e-4)
    if model == "dense":
        assert (first["trained"] - first["start"]).abs().max() > 0.1
        stepped = {f"decoder.layers.{layer}.{part}.{each}" for layer in (0, 1) for part in PARTS for each in NAMES}
        for result in (one, first, *others):
            assert torch.equal(result["start"], result["frozen"]) and torch.equal(result["frozen"], result["frozen again"])
            assert result["stepped"] == result["gradients"] == result["changed"] == stepped
            assert result["masters"] == [], "a frozen weight needs no FP32 copy"
        copies = [name for name, whole in one["adapters"].items() if first["adapters"][name].shape == whole.shape]
        assert copies and all(torch.equal(first["adapters"][name], others[0]["adapters"][name]) for name in copies)
    if precision is not FP8:
        (again,) = worlds(1).call(score_checkpoint, folder, precision, targets(model), batches[0], Layout(), run)
        torch.testing.assert_close(first["trained"], again, rtol=0, atol=0 if exact else 1e-4)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_layers_that_are_recomputed_learn_the_same(worlds, model_folder, recompute):
    """With adapters on MLPs only, the input of the first layer needs no gradient."""
    run = model_folder("qwen3_moe"), FP32, LORA | {"targets": FC}, [random_sequences(4, 1), random_sequences(4, 2)], Layout(), None
    kept, again = (worlds(1).call(trainer.train_adapters, *run, {"recompute": how})[0] for how in ("none", recompute))
    assert kept["gradients"] == again["changed"] and torch.equal(kept["trained"], again["trained"])


def test_layers_for_multi_token_prediction_stay_with_the_base(worlds, tmp_path):
    folder, run = make_model(tmp_path / "model", ARCHITECTURES["deepseek_v3"]), tmp_path / "step_00001"
    add_mtp_layer(folder)
    worlds(1).call(trainer.train_adapters, folder, FP32, targets("deepseek_v3"), [random_sequences(2, 0)], Layout(), run)
    assert (run / "state.json").is_file() and not (run / "mtp").exists()
