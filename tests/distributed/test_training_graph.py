"""The training graph of real Megatron models: the format of each tensor, with one and two ranks, and planted differences."""

from itertools import chain

import pytest
import torch.distributed as dist
from support.families import ARCHITECTURES, QUANTIZED
from support.models import FP8, FP32
from support.planted_differences import plant_difference
from support.trainer import Trainer

from megatron_rl.diagnosis.graph_check import read_training_graph
from megatron_rl.errors import RunError
from megatron_rl.precision.contract import QUANTIZED_ROLES
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision, compare_kernels, describe_differences, fold_layers
from parallel.families import FAMILIES
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

LINEARS = {"attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"}
BF16 = {"mode": "bf16", "high": "bf16"}


def read_trainer_graph(folder, precision, plant="", only_on=None, layout=None):
    """Return the training graph of a checkpoint. A difference is planted on every rank, or only on rank `only_on`."""
    model = Trainer(folder, precision, layout=layout).model
    with plant_difference(model, plant if only_on in (None, dist.get_rank()) else ""):
        return read_training_graph(model).run(lambda graph: graph, PrecisionGraph)


def formats(graph, phase, tensor):
    """Map each target to the precision of the tensor, in the model's only kind of layer."""
    _, (layers, (part,)) = fold_layers(graph)
    assert layers == (0, 1)
    return {edge.target: edge.format for edge in part.edges if edge.phase == phase and edge.tensor == tensor}


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_unified_fp8_as_the_contract_says(worlds, checkpoint, scale):
    graph = worlds(1).call(read_trainer_graph, checkpoint, {**FP8, "scale_format": scale, "high": "bf16"})[0]
    high, x, weight = TensorPrecision("bf16"), TensorPrecision("e4m3", "1x128", scale), TensorPrecision("e4m3", "128x128", scale)
    norms = {"input_norm", "post_attention_norm", "attention.q_norm", "attention.k_norm"}
    assert formats(graph, "forward", "weight") == dict.fromkeys(LINEARS, weight) | dict.fromkeys(norms, high)
    read = formats(graph, "forward", "x")
    assert {target for target, format in read.items() if format == x} == LINEARS
    assert {format for target, format in read.items() if target not in LINEARS} == {high}
    assert {"q": high, "k": high, "v": high} == {
        edge.tensor: edge.format for edge in graph.edges if edge.target == "layers.1.attention.core" and edge.phase == "forward"
    }
    outside = [edge for edge in fold_layers(graph)[0][1][0].edges if edge.phase == "forward"]
    assert {edge.format for edge in outside} == {high} and {edge.target for edge in outside} == {"embedding", "norm", "lm_head", "logprobs"}

    dgrad = {f"{name}.backward" for name in LINEARS}
    assert {formats(graph, "dgrad", "weight")[name] for name in dgrad} == {weight}
    assert formats(graph, "dgrad", "dy") == dict.fromkeys(dgrad, x)
    wgrad = {f"{name}.wgrad" for name in LINEARS}
    assert formats(graph, "wgrad", "dy") == dict.fromkeys(wgrad, x)
    assert formats(graph, "wgrad", "x") == dict.fromkeys(wgrad, TensorPrecision("e4m3", "128x1", scale))
    assert {edge.format for edge in graph.edges if edge.tensor in ("grad", "master")} == {TensorPrecision("fp32")}


def test_in_bf16_no_tensor_is_quantized(worlds, checkpoint):
    graph = worlds(1).call(read_trainer_graph, checkpoint, BF16)[0]
    assert {edge.format for edge in graph.select_forward().edges} == {TensorPrecision("bf16")}
    assert {edge.format for edge in graph.edges if edge.tensor in ("grad", "master")} == {TensorPrecision("fp32")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_family_is_in_its_graph(worlds, model_folder, family):
    precision = FP8 if family in QUANTIZED else BF16
    graph = worlds(1).call(read_trainer_graph, model_folder(family), precision)[0]
    quantized = {edge.source for edge in graph.edges if edge.tensor == "weight" and edge.phase == "forward" and edge.format.granularity}
    every = {node.name: node.count for node in graph.nodes if node.op == "weight"}
    halves = {name.replace("kv_b.k", "kv_b.v") for name in every if "kv_b.k" in name}  # of one weight, where latents are absorbed
    counts = {name: count for name, count in every.items() if name not in halves}
    assert halves <= every.keys()
    roles = [part.pieces[0].tensor.role for part in chain(*ModelGeometry.from_hf_config(ARCHITECTURES[family]).list_weights())]
    assert sum(counts.values()) == len(roles)
    of_quantized_roles = sum(role in QUANTIZED_ROLES for role in roles) if family in QUANTIZED else 0
    assert sum(counts[name] for name in quantized - halves) == of_quantized_roles


def test_two_ranks_tell_the_graph_of_one(worlds, checkpoint):
    alone = worlds(1).call(read_trainer_graph, checkpoint, FP8)[0]
    assert worlds(2).call(read_trainer_graph, checkpoint, FP8) == [alone, alone]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_5_text"])
def test_ranks_of_context_parallelism_tell_the_graph_of_one(worlds, model_folder, family):
    folder = model_folder(family)
    alone = worlds(1).call(read_trainer_graph, folder, FP8)[0]
    assert worlds(2).call(read_trainer_graph, folder, FP8, "", None, Layout(cp=2)) == [alone, alone]


def test_another_number_of_parts_of_row_parallel_sums_is_another_kernel(worlds, checkpoint):
    precision = {**FP8, "high": "bf16", "reduction": "ranks", "parts": 2}
    one, other = (worlds(1).call(read_trainer_graph, checkpoint, {**precision, "parts": parts})[0] for parts in (2, 4))
    two = worlds(2).call(read_trainer_graph, checkpoint, precision, "", None, Layout(tp=2))[0]
    same, differing = ({each.operator: each.verdict for each in compare_kernels(each, one)} for each in (two, other))
    assert set(same.values()) == {"same kernel"}
    assert {name for name in same if differing[name] == "differs"} == {"layers 0..1: attention.output", "layers 0..1: mlp.down"}


def test_tied_embeddings_have_the_same_operators(worlds, checkpoint, tied_checkpoint):
    tied, untied = (worlds(1).call(read_trainer_graph, folder, FP32)[0].select_forward() for folder in (tied_checkpoint, checkpoint))
    assert {node.name for node in tied.nodes} == {node.name for node in untied.nodes}


@pytest.mark.parametrize(
    "plant, line",
    [
        ("granularity", "layer 1: mlp.down.weight -> mlp.down (weight) is e4m3 128x128 pow2 in the rollout, e4m3 64x64 pow2 in training"),
        (
            "weight scales",
            "layer 1: mlp.gate_up.weight -> mlp.gate_up (weight) is e4m3 128x128 pow2 in the rollout, e4m3 128x128 fp32 in training",
        ),
        ("activation scales", "layers 0..1: mlp.swiglu -> mlp.down (x) is e4m3 1x128 pow2 in the rollout, e4m3 1x128 fp32 in training"),
        ("high-precision layer", "layer 1: attention.core -> attention.output (x) is e4m3 1x128 pow2 in the rollout, fp32 in training"),
        ("fp8 head", "lm_head.weight -> lm_head (weight) is fp32 in the rollout, e4m3 128x128 pow2 in training"),
        ("dtype", "layer 1: input_norm.weight -> input_norm (weight) is fp32 in the rollout, fp16 in training"),
    ],
)
def test_what_is_planted_in_a_live_model_shows_in_its_graph(worlds, checkpoint, plant, line):
    clean, other = (worlds(1).call(read_trainer_graph, checkpoint, FP8, difference)[0] for difference in ("", plant))
    assert describe_differences(clean.select_forward(), clean) == []
    assert line in describe_differences(clean.select_forward(), other)


def test_ranks_that_differ_are_an_error_on_all_of_them(worlds, checkpoint):
    with pytest.raises(RunError, match=r"ranks disagree about layers.1.input_norm.weight -> layers.1.input_norm \(weight\): fp32 and fp16"):
        worlds(2).call(read_trainer_graph, checkpoint, FP8, "dtype", 1)


def test_a_parameter_that_no_known_operator_uses_is_refused(worlds, checkpoint):
    with pytest.raises(RunError, match="has no operator that uses the megatron parameter decoder.layers.1.mlp.extra"):
        worlds(1).call(read_trainer_graph, checkpoint, FP8, "unknown parameter")
