"""Experts: routing that is recorded, replayed and balanced is the same in every layout."""

from dataclasses import replace

import pytest
import torch
from support.families import parse_layout
from support.models import FP8, FP32, random_sequences, read_weights
from support.samples import with_random_routing
from support.trainer import Trainer, gather, negative_log_likelihood, own
from support.training_runs import ScriptedWorker, run_loop, without_times

from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.layers.moe import token_counts
from megatron_rl.mcore.layers.moe.router import Router

BATCH = random_sequences(7, seed=1)
TRAIN = {"micro_batch_tokens": 60, "adam_eps": 1e-4}
CHANGE = {"update/abs_mean", "update/abs_max"}


def train_once(folder, batch, layout, train=None):
    """Return log-probs, metrics and records of routers that follow a batch's records and of free ones, and metrics and weights of one
    step."""
    trainer = Trainer(folder, FP32, {**TRAIN, **(train or {})}, layout=layout)
    routing, results = trainer.actor.routing, {}
    share = own(batch)
    with routing.collect_stats(share, keep=True) as watch:
        results["logprobs"] = torch.cat(gather(share, trainer.actor.compute_logprobs(share)[0]))
    results |= {"metrics": watch.gather_metrics(), "records": gather(share, watch.gather_records())}
    with routing.disable_replay(), routing.collect_stats(share, keep=True) as watch:
        results["free"] = torch.cat(gather(share, trainer.actor.compute_logprobs(share)[0]))
    results |= {"free_metrics": watch.gather_metrics(), "free_records": gather(share, watch.gather_records())}
    results["step"] = trainer.actor.update(share, negative_log_likelihood)
    return results | {"masters": trainer.collect_tensors(fp8=False)}


def own_routing(folder, batch):
    """Take a step on a batch as it is, and from the same start a step with the records of its own routing."""
    plain = train_once(folder, batch, None)
    routed = [replace(sequence, routed_experts=record) for sequence, record in zip(batch, plain["records"], strict=True)]
    return {"plain": plain, "replayed": train_once(folder, routed, None)}


def balance(folder, batch, train, steps):
    """Take steps whose only loss is the balancing. Return the routers' metrics before each."""
    trainer, metrics = Trainer(folder, FP32, {"micro_batch_tokens": 60, **train}), []
    for _ in range(steps):
        with trainer.actor.routing.collect_stats(batch) as watch:
            trainer.actor.compute_logprobs(batch)
        metrics.append(watch.gather_metrics())
        trainer.actor.update(own(batch), _nothing)
    return metrics


def balance_gradient(folder, batch, weight):
    """Return the gradient of the last layer's router under the load-balancing loss alone, and the same gradient from the formula."""
    trainer = Trainer(folder, FP32, {"micro_batch_tokens": 60, "router_aux_loss": weight, "clip_grad": 0.0, "learning_rate": 1e-9})
    router = [module for module in trainer.model.modules() if isinstance(module, Router)][-1]
    seen = []
    hook = router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().flatten(0, 1)))
    trainer.actor.update(own(batch), _nothing)
    hook.remove()
    gradient = router.weight.main_grad.clone()
    matrix = router.weight.detach().clone().requires_grad_()
    micro_batches, total = trainer.actor.make_micro_batches(batch), sum(sequence.length - 1 for sequence in batch)
    for x, micro_batch in zip(seen, micro_batches, strict=True):
        real = x[: len(x) - micro_batch.padding]
        probabilities = (real @ matrix.t()).softmax(-1)
        chosen = probabilities.topk(router.topk).indices.flatten().bincount(minlength=len(matrix)) / (len(real) * router.topk)
        loss = weight * len(matrix) * (chosen * probabilities.mean(0)).sum()
        (loss * len(real) / total).backward()
    return {"gradient": gradient, "formula": matrix.grad}


def break_a_step(folder, batch):
    """Take a step that would move the correction biases, but has a NaN loss. Return the error and the largest change of a bias."""
    trainer = Trainer(folder, FP32, {**TRAIN, "router_bias_rate": 0.01})
    routers = [module for module in trainer.model.modules() if isinstance(module, Router)]
    before = [router.expert_bias.clone() for router in routers]
    try:
        trainer.actor.update(own(batch), lambda logprobs, batch: (float("nan") * (logprobs * batch.mask).sum(), {}))
    except RunError as error:
        moved = max(float((router.expert_bias - bias).abs().max()) for router, bias in zip(routers, before, strict=True))
        return str(error), moved
    raise AssertionError("the step was taken")


class RoutedWorker(ScriptedWorker):
    """A scripted worker with an engine's routing: the trainer's own, except that the first token of every sequence goes to the next
    experts."""

    def collect(self, version):
        rollout, sequences, routing = super().collect(version), self.sequences(), self.actor.routing
        with routing.disable_replay(), routing.collect_stats(sequences, keep=True) as watch:
            self.actor.compute_logprobs(sequences)
        for completion, record in zip(rollout.completions_B, watch.gather_records(), strict=True):
            record[0] = (record[0] + 1) % routing.shape.num_experts
            completion.routed_experts_T = record.numpy()
        return rollout


def loop(folder, replay):
    """Return the log of two steps in unified FP8 with a KL term, the second with an attribution."""
    algorithm = {"routing_replay": replay, "updates_per_step": 2, "kl_coef": 0.001}
    return run_loop(folder, FP8, algorithm, steps=2, noise=0.0, attribute_every=2, worker=RoutedWorker)["rows"]


def update_once(folder, replay, on_device):
    """Return the log of two steps with one optimizer step each, and whether each update replayed records."""
    replayed, update = [], Actor.update

    def observe(actor, samples, loss, check):
        replayed.append(all(len(sample.routed_experts) for sample in samples))
        return update(actor, samples, loss, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "update", observe)
        patch.setattr(token_counts, "counts_on_device", lambda: on_device)
        rows = run_loop(folder, FP8, {"routing_replay": replay}, steps=2, noise=0.0, worker=RoutedWorker)["rows"]
    return without_times(rows), replayed


def _nothing(logprobs, batch):
    return 0.0 * (logprobs * batch.mask).sum(), {}


@pytest.fixture(scope="module")
def folders(model_folder):
    layers = {"num_hidden_layers": 2}
    return {"qwen3_moe": model_folder("qwen3_moe", **layers, mlp_only_layers=[]), "deepseek_v3": model_folder("deepseek_v3", **layers)}


ROUTED = {"qwen3_moe": with_random_routing(BATCH, 4, 2), "deepseek_v3": with_random_routing(BATCH, 8, 4)}


@pytest.mark.parametrize("name", ROUTED)
def test_replay_takes_the_recorded_experts_and_nothing_else_changes(worlds, folders, alone, name):
    scores, layers = alone(train_once, folders[name], ROUTED[name], None), slice(0 if name == "qwen3_moe" else 1, 2)
    for sequence, record in zip(ROUTED[name], scores["records"], strict=True):
        assert torch.equal(record[:, layers], sequence.routed_experts[:, layers])
    assert (scores["logprobs"] - scores["free"]).abs().mean() > 1e-2
    assert 0.5 < scores["free_metrics"]["router/differs"] <= 1
    both = worlds(1).call(own_routing, folders[name], BATCH)[0]
    for record, freely in zip(both["plain"]["records"], scores["free_records"], strict=True):
        assert torch.equal(record, freely)
    assert torch.equal(both["plain"]["logprobs"], scores["free"]) and torch.equal(both["replayed"]["logprobs"], scores["free"])
    assert both["replayed"]["metrics"] == {**both["plain"]["metrics"], "router/differs": 0.0}
    for weight, value in both["plain"]["masters"].items():
        assert torch.equal(value, both["replayed"]["masters"][weight]), weight


REPLAYED = [("qwen3_moe", "dp2 ep2 pp2"), ("qwen3_moe", "tp2 dp2 ep2 etp2"), ("deepseek_v3", "tp2 dp2 ep2 etp1")]
LONG_REPLAYED = [*(("qwen3_moe", name) for name in ("tp2", "tp2 etp1", "dp2 ep2", "dp4 ep4", "tp2 dp2 ep2 etp1"))]
LONG_REPLAYED += [("deepseek_v3", "dp2 ep2 pp2")]


@pytest.mark.parametrize("name, layout", [*REPLAYED, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_REPLAYED)])
def test_replay_in_any_layout_equals_that_of_one_process(worlds, folders, alone, name, layout):
    sizes, expected = parse_layout(layout), alone(train_once, folders[name], ROUTED[name], None)
    ranks = worlds(sizes.world_size).call(train_once, folders[name], ROUTED[name], sizes)
    for scores in ranks:
        for kind in ("metrics", "free_metrics"):
            assert scores[kind] == pytest.approx(expected[kind], rel=1e-5)
            assert scores[kind]["router/dropped"] == 0
        for kind in ("records", "free_records"):
            assert all(torch.equal(record, other) for record, other in zip(scores[kind], expected[kind], strict=True))
        for kind in ("logprobs", "free"):
            assert torch.allclose(scores[kind], expected[kind], atol=1e-4)
    for key in ("loss/total", "grad_norm"):
        assert ranks[0]["step"][key] == pytest.approx(expected["step"][key], rel=1e-5)
    assert_same_masters(folders[name], expected["masters"], ranks[0]["masters"])


def assert_same_masters(folder, expected, masters):
    start = read_weights(folder)
    for weight, value in expected.items():
        assert (value - masters[weight]).norm() <= 1e-3 * (value - start[weight]).norm(), weight


BALANCED = {
    "qwen3_moe": {"router_aux_loss": 0.5, "micro_batch_tokens": 1},  # the loss is a micro-batch's: every sequence is one, in any layout
    "deepseek_v3": {"router_aux_loss": 0.5, "micro_batch_tokens": 1, "router_bias_rate": 0.01},
}


@pytest.mark.parametrize(
    "name, layouts",
    [
        ("qwen3_moe", ["dp2 ep2", "tp2 dp2 ep2 etp2", "dp2 ep2 pp2"]),
        pytest.param("deepseek_v3", ["tp2 etp1", "tp2 dp2 ep2 etp1"], marks=pytest.mark.long),
    ],
)
def test_balancing_in_any_layout_equals_that_of_one_process(worlds, folders, alone, name, layouts):
    expected = alone(train_once, folders[name], BATCH, None, BALANCED[name])
    start = read_weights(folders[name])
    biases = [weight for weight in start if weight.endswith("correction_bias")]
    for layout in layouts:
        sizes = parse_layout(layout)
        scores = worlds(sizes.world_size).call(train_once, folders[name], BATCH, sizes, BALANCED[name])[0]
        assert scores["step"]["grad_norm"] == pytest.approx(expected["step"]["grad_norm"], rel=1e-5)
        assert_same_masters(folders[name], expected["masters"], scores["masters"])
    for weight in biases:
        moved = ((expected["masters"][weight] - start[weight]) / 0.01).round(decimals=3).abs()
        assert ((moved == 0) | (moved == 1)).all() and moved.any()


def test_the_load_balancing_loss_is_its_formula(worlds, folders):
    scores = worlds(1).call(balance_gradient, folders["qwen3_moe"], BATCH, 0.3)[0]
    torch.testing.assert_close(scores["gradient"], scores["formula"], rtol=1e-4, atol=1e-8)
    assert scores["formula"].norm() > 1e-4


def test_the_bias_evens_the_load(worlds, folders):
    train = {"router_bias_rate": 0.05, "learning_rate": 1e-9}
    scores = worlds(1).call(balance, folders["deepseek_v3"], BATCH, train, 10)[0]
    assert scores[-1]["router/load_mean"] - 1 < 0.6 * (scores[0]["router/load_mean"] - 1)


def test_a_broken_step_leaves_the_biases_as_they_were(worlds, folders):
    raised, moved = worlds(1).call(break_a_step, folders["deepseek_v3"], BATCH)[0]
    assert "the loss of optimizer step 1 is nan" in raised and moved == 0


@pytest.mark.parametrize("replay", ["none", "engine", pytest.param("trainer", marks=pytest.mark.long)])
def test_the_loop_replays_what_it_is_told_to(worlds, folders, replay):
    """The scripted engine has the log-probs of the trainer's own routing, so replaying its different experts for one token is a
    mismatch."""
    first, second = worlds(1).call(loop, folders["qwen3_moe"], replay)[0][1:]
    for row in (first, second):
        assert row["router/dropped"] == 0 and 1 <= row["router/load_mean"] <= row["router/load_max"]
        assert 0 < row["router/entropy_min"] <= row["router/entropy"] < 1.4  # ln 4
        assert {"router/load/layer_0", "router/load/layer_1"} <= row.keys()
        assert (row["mismatch/abs_mean"] > 1e-3) == (replay == "engine")
        assert (row.get("router/differs", 0.0) > 0.05) == (replay == "engine")
    assert ("mismatch/without_replay/abs_mean" in second) == (replay == "engine") and "mismatch/without_replay/abs_mean" not in first
    if replay == "engine":
        assert second["mismatch/without_replay/abs_max"] == 0 < second["router/differs_without_replay"] <= second["router/differs"]


def test_on_a_gpu_a_steps_only_update_replays_the_pass_before_it(worlds, folders):
    """The run is that with `routing_replay = "trainer"`, except that the measured change is that of a policy that chooses its experts."""
    run = worlds(1).call
    (chosen, never), (own, always), (recorded, asked) = (
        run(update_once, folders["qwen3_moe"], *case)[0] for case in (("none", False), ("none", True), ("trainer", False))
    )
    assert never == [False] * 2 and always == asked == [True] * 2
    for row, trainers, plain in zip(own, recorded, chosen, strict=True):
        assert row.keys() == trainers.keys() == plain.keys()
        assert {name for name in row if row[name] != trainers[name]} <= CHANGE
