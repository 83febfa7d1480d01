"""A critic on Megatron's model has the numbers of transformers, and in every layout those of one process."""

import re
from dataclasses import replace

import critics
import pytest
import torch
from safetensors.torch import load_file
from support.families import parse_layout
from support.models import FP8, FP32, random_sequences
from support.transformers_reference import load

from parallel.layout import Layout

HEAD = re.compile(r"lm_head|value_head|logprobs|values")
TRAIN = {"micro_batch_tokens": 60, "adam_eps": 1e-4}


def compute_step(folder, samples):
    """Compute the first step of a critic by transformers. Return its values float32 `[tokens]`, its loss and the norm of its gradient."""
    model, head = load(folder).model, load_file(folder / "model.safetensors")["score.weight"].requires_grad_()
    model.get_input_embeddings().padding_idx = None
    of_samples, losses = [], []
    for sample in samples:
        hidden = model(sample.ids[None]).last_hidden_state[0]
        values = (hidden @ head.t())[len(sample.prompt_ids) - 1 : -1, 0]
        of_samples.append(values)
        bounded = sample.values + (values - sample.values).clamp(-critics.CLIPRANGE, critics.CLIPRANGE)
        losses.append(torch.maximum((values - sample.returns) ** 2, (bounded - sample.returns) ** 2) / 2)
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in (*model.parameters(), head)])
    return {"values": torch.cat(of_samples).detach(), "loss": float(loss), "grad_norm": float(norm)}


def batches():
    return [
        [replace(sample, reward=float(number % 3), advantage=0.0) for number, sample in enumerate(random_sequences(count, seed=seed))]
        for count, seed in ((7, 1), (5, 2))
    ]


@pytest.fixture(scope="module")
def models(checkpoint, tied_checkpoint, model_folder, tmp_path_factory):
    """Maps a name to the policy's checkpoint and the critic's, whose value head is nonzero."""
    folders = {
        "untied": checkpoint,
        "tied": tied_checkpoint,
        "deep": model_folder("qwen3"),
        "moe": model_folder("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0]),
        "latent": model_folder("deepseek_v3", num_hidden_layers=2),
    }
    parent = tmp_path_factory.mktemp("critics")
    return {name: (folder, critics.make_value_model(parent / name, folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def train_alone(alone, models):
    def get(name, precision):
        folder, path = models[name]
        return alone(critics.train_critic, folder, precision, TRAIN, batches(), Layout(), path)

    return get


def test_values_loss_and_gradient_are_those_of_transformers(train_alone, models, transformers_process):
    result, (batch, _) = train_alone("tied", FP32), batches()
    lengths = [sample.sampled_count for sample in batch]
    columns = (result[name].split(lengths) for name in ("values", "returns"))
    samples = [replace(s, values=values, returns=returns) for s, values, returns in zip(batch, *columns, strict=True)]
    expected = transformers_process.call(compute_step, models["tied"][1], samples)[0]
    assert expected["values"].std() > 0.1
    assert (result["values"] - expected["values"]).abs().max() < 1e-4
    assert result["steps"][0]["critic/loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert result["steps"][0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert result["steps"][0]["critic/clip_fraction"] == 0, "values have not moved"


CASES = [
    ("tp2", "untied", FP32),
    ("dp2", "untied", FP8),
    ("pp2", "tied", FP8),
    ("tp2 pp2", "deep", FP32),
    ("pp2 vpp2", "deep", FP8),
    ("cp2", "deep", FP32),
    ("dp2 ep2", "moe", FP8),
]
LONG_CASES = [
    ("tp2 dp2", "latent", FP32),
    ("tp2 cp2", "deep", FP8),
    ("pp2", "untied", FP8 | {"kv": "e4m3_per_layer"}),
    ("dp2", "untied", {"mode": "fp8_rollout", "high": "fp32"}),
]


def name_case(case):
    return "-".join([*case[:2], *case[2].values()])


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    "name, model, precision",
    [
        *(pytest.param(*case, id=name_case(case)) for case in CASES),
        *(pytest.param(*case, id=name_case(case), marks=pytest.mark.long) for case in LONG_CASES),
    ],
)
def test_training_in_a_layout_equals_that_of_one_process(worlds, models, train_alone, name, model, precision):
    expected, layout, (folder, path) = train_alone(model, precision), parse_layout(name), models[model]
    result, *others = worlds(layout.world_size).call(critics.train_critic, folder, precision, TRAIN, batches(), layout, path)
    for column in ("values", "token_advantages", "returns"):
        assert torch.equal(result[column], expected[column]), f"{column}, bit for bit"
    assert result["metrics"] == expected["metrics"] and abs(result["metrics"]["critic/explained_variance"]) > 0
    assert all(other["steps"] == result["steps"] for other in others)
    tolerance = 5e-2 if precision["mode"] == "fp8_unified" else 1e-5
    for number, (step, expected_step) in enumerate(zip(result["steps"], expected["steps"], strict=True)):
        for metric in ("critic/loss", "critic/clip_fraction", "grad_norm"):
            exact = 1e-5 if number == 0 else tolerance
            assert step[metric] == pytest.approx(expected_step[metric], rel=exact, abs=exact), (number, metric)
    assert (result["after"] - expected["after"]).abs().max() < tolerance * (expected["after"] - expected["values"]).abs().max()
    masters = {key: values for one in (result, *others) for key, values in one["masters"].items()}
    assert masters.keys() == expected["masters"].keys() and "output_layer.weight" in masters
    for key, values in expected["masters"].items():
        moved = 2e-3 * values.numel() ** 0.5  # two steps of 1e-3 by Adam
        assert (masters[key] - values).norm() < max(3 * tolerance, 1e-3) * moved, key


def test_without_sequence_parallelism_it_is_the_same(worlds, models, train_alone):
    expected, (folder, path) = train_alone("untied", FP32), models["untied"]
    train = TRAIN | {"layout": {"sequence_parallel": False}, "recompute": "full"}
    result = worlds(2).call(critics.train_critic, folder, FP32, train, batches(), parse_layout("tp2"), path)[1]
    assert torch.equal(result["values"], expected["values"])
    assert [step["grad_norm"] for step in result["steps"]] == pytest.approx([step["grad_norm"] for step in expected["steps"]], rel=1e-5)


def test_a_policys_checkpoint_starts_with_values_of_0_and_learns(worlds, models):
    folder, _ = models["tied"]
    result = worlds(1).call(critics.train_critic, folder, FP8, TRAIN, [batches()[0]] * 12)[0]
    assert not result["values"].any()
    losses = [step["critic/loss"] for step in result["steps"]]
    assert losses[-1] < 0.5 * losses[0] and result["after"].std() > 0.01
    high = worlds(1).call(critics.train_critic, folder, {"mode": "fp8_unified", "high": "bf16"}, TRAIN, [batches()[0]] * 3)[0]
    assert high["steps"][0]["critic/loss"] == pytest.approx(losses[0], rel=1e-6) and high["steps"][2]["critic/loss"] < losses[0]


@pytest.mark.parametrize("high", ["fp32", "bf16"])
def test_its_precision_graph_is_the_policys_with_a_value_head_in_high_precision(worlds, models, high):
    precision = {"mode": "fp8_unified", "high": high}
    policy, critic = worlds(2).call(critics.read_graphs, models["untied"][0], precision, Layout(pp=2))[0]
    heads = [{edge for edge in graph.edges if HEAD.search(f"{edge.source} {edge.target}")} for graph in (policy, critic)]
    assert set(policy.edges) - heads[0] == set(critic.edges) - heads[1] and len(policy.edges) > 50
    formats = {(edge.source, edge.target): edge.format.dtype for edge in heads[1]}
    assert formats["norm", "value_head"] == high and formats["value_head", "values"] == "fp32"
    assert {"e4m3"} <= {edge.format.dtype for edge in critic.edges} and not any("lm_head" in edge.target for edge in critic.edges)
