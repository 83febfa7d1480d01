"""The precision graph without models: comparison, folding of layers, merging of ranks, and the formats read from tensors."""

import io
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from support.toy_format import TOY

from megatron_rl.errors import RunError
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.precision.graph.decoder import Gradients, LayerPrecision, Operator, decoder_graph
from megatron_rl.precision.graph.graph import (
    GRAPH_JSON,
    Edge,
    Node,
    PrecisionGraph,
    TensorPrecision,
    describe_differences,
    fold_layers,
    fold_to_json,
    format_title,
    merge_graphs,
)
from megatron_rl.precision.graph.kernels import Kernel
from megatron_rl.precision.graph.reader import block_format, channel_format, check_scales, unquantized_format
from megatron_rl.precision.graph.render import draw_svg, print_graphs
from parallel.formats import FORMATS

HIGH, X, W = TensorPrecision("bf16"), TensorPrecision("e4m3", "1x128", "pow2"), TensorPrecision("e4m3", "128x128", "pow2")
FP32 = TensorPrecision("fp32")
LINEARS = ("attention.qkv", "attention.output")
NORMS = ("input_norm", "attention.q_norm", "attention.k_norm", "post_attention_norm")


def linear(trained: bool, x: TensorPrecision = X, weight: TensorPrecision = W, count: int = 1) -> Operator:
    gradients = Gradients(x, weight, x, replace(x, granularity="128x1") if x.granularity else x, FP32, FP32)
    return Operator({"x": x, "weight": weight}, gradients=gradients if trained else None, count=count)


def high(trained: bool) -> Operator:
    return linear(trained, HIGH, HIGH)


def layer(trained: bool = False, experts: int = 0, **change: Operator) -> LayerPrecision:
    mlps = {"mlp.experts": experts, "mlp.shared_experts": 1} if experts else {"mlp": 1}
    operators = {name: linear(trained) for name in LINEARS} | {name: high(trained) for name in NORMS}
    operators |= {f"{mlp}.{side}": linear(trained, count=count) for mlp, count in mlps.items() for side in ("gate_up", "down")}
    operators |= {"mlp.router": high(trained)} if experts else {}
    return LayerPrecision(operators | change, HIGH, HIGH, logits=HIGH if experts else None)


def decoder(layers: int = 3, trained: bool = False, experts: int = 0, **change: Operator) -> PrecisionGraph:
    return connect({number: layer(trained, experts) for number in range(layers)}, trained, **change)


def connect(layers: dict[int, LayerPrecision], trained: bool = False, **change: Operator) -> PrecisionGraph:
    """Return the graph of a whole model with these layers."""
    ends = {"embedding": high(trained).with_inputs(x=None), "norm": high(trained), "lm_head": high(trained)}
    return decoder_graph(HIGH, layers, ends | {"logprobs": Operator({"x": HIGH})} | change)


TRAINING = decoder(trained=True)
ROLLOUT = decoder()


def changed(graph: PrecisionGraph, name: str, **change: str) -> PrecisionGraph:
    """Return the graph with the edges into `name` changed."""
    edges = (replace(edge, format=replace(edge.format, **change)) if edge.target == name else edge for edge in graph.edges)
    return PrecisionGraph(graph.nodes, tuple(edges))


@pytest.mark.parametrize("experts", [0, 8])
def test_a_rollout_that_computes_as_the_training_is_its_subgraph(experts):
    training, rollout = (decoder(trained=trained, experts=experts) for trained in (True, False))
    assert describe_differences(rollout, training) == []
    assert len(training.edges) > 2 * len(rollout.edges)  # the backward pass is not compared
    assert set(training.select_forward().edges) == set(rollout.edges)


def test_post_norms_stand_before_the_residual_stream():
    post_norms = {"attention.post_norm": high(False), "mlp.post_norm": high(False)}
    graph = connect({0: layer(**post_norms)})
    edges = {(edge.source, edge.target) for edge in graph.edges}
    for part, last in (("attention", "output"), ("mlp", "down")):
        output, norm, stream = (f"layers.0.{part}.{name}" for name in (last, "post_norm", "residual"))
        assert {(output, norm), (norm, stream)} <= edges and (output, stream) not in edges
    assert "layer 0: mlp.post_norm is norm in the rollout, absent in training" in describe_differences(graph, decoder(1))


def every_layer(changed: LayerPrecision) -> PrecisionGraph:
    """Return a rollout whose layers are all `changed`."""
    return connect(dict.fromkeys(range(3), changed))


def differences(one: str, other: str, *edges: str) -> list[str]:
    return [f"{edge} is {one} in the rollout, {other} in training" for edge in edges]


KV = ("rope -> attention.core (k)", "qkv -> attention.core (v)")
PLANTED = {
    "granularity": (
        changed(ROLLOUT, "layers.1.mlp.down", granularity="1x64"),
        differences("e4m3 1x64 pow2", "e4m3 1x128 pow2", "layer 1: mlp.swiglu -> mlp.down (x)")
        + differences("e4m3 1x64 pow2", "e4m3 128x128 pow2", "layer 1: mlp.down.weight -> mlp.down (weight)"),
    ),
    "scale format": (
        every_layer(layer(**{"mlp.gate_up": linear(False, replace(X, scale="fp32"))})),
        differences("e4m3 1x128 fp32", "e4m3 1x128 pow2", "layers 0..2: post_attention_norm -> mlp.gate_up (x)"),
    ),
    "an extra quantized layer": (
        decoder(lm_head=linear(False)),
        differences("e4m3 1x128 pow2", "bf16", "norm -> lm_head (x)")
        + differences("e4m3 128x128 pow2", "bf16", "lm_head.weight -> lm_head (weight)"),
    ),
    "dtype": (
        changed(ROLLOUT, "layers.0.input_norm", dtype="fp32"),
        differences("fp32", "bf16", "layer 0: input -> input_norm (x)", "layer 0: input_norm.weight -> input_norm (weight)"),
    ),
    "cache": (
        every_layer(replace(layer(), kv=TensorPrecision("e4m3", "tensor", "fp32"))),
        differences("e4m3 tensor fp32", "bf16", *(f"layers 0..2: attention.{edge}" for edge in KV)),
    ),
    "a missing layer": (decoder(layers=2), differences("absent", "norm", "layer 2: input_norm")),
    "a bias": (
        every_layer(layer(**{"attention.qkv": linear(False).with_inputs(bias=HIGH)})),
        differences("weight", "absent", "layers 0..2: attention.qkv.bias"),
    ),
    "other experts": (decoder(experts=8), differences("linear x8", "absent", "layers 0..2: mlp.experts.down")),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_difference_is_named(plant):
    rollout, expected = PLANTED[plant]
    result = describe_differences(rollout, TRAINING)
    assert result == expected or ("absent" in expected[0] and set(expected) <= set(result))


def latent_graph(trained: bool, absorbed: bool, read: TensorPrecision = HIGH) -> PrecisionGraph:
    halves = ("kv_b.k", "kv_b.v") if absorbed else ("kv_b",)
    operators = {f"attention.{name}": linear(trained) for name in ("q_a", "q_b", "kv_a", "output")}
    operators |= {f"attention.{name}": high(trained) for name in ("q_a_norm", "kv_a_norm")}
    operators |= {f"attention.{half}": linear(trained).with_inputs(x=read) for half in halves}
    rest = {name: each for name, each in layer(trained).operators.items() if not name.startswith("attention.")}
    return connect({0: LayerPrecision(rest | operators, HIGH, HIGH)}, trained)


@pytest.mark.parametrize("absorbed, weights", [(False, ["kv_b"]), (True, ["kv_b.k", "kv_b.v"])])
def test_latent_attention_shows_what_multiplies_with_kv_b(absorbed, weights):
    training, rollout = latent_graph(True, absorbed, X), latent_graph(False, absorbed, X)
    assert describe_differences(rollout, training) == []
    learned = {edge.target for edge in training.edges if edge.tensor == "master" and ".kv_b" in edge.target}
    assert learned == {f"layers.0.attention.{weight}.weight" for weight in weights}
    source = "q_b -> attention.kv_b.k" if absorbed else "kv_a_norm -> attention.kv_b"
    line = f"layer 0: attention.{source} (x) is bf16 in the rollout, e4m3 1x128 pow2 in training"
    assert line in describe_differences(latent_graph(False, absorbed), training)
    lines = describe_differences(latent_graph(False, False), latent_graph(True, True))
    assert "layer 0: attention.kv_b is linear in the rollout, absent in training" in lines


def test_equal_layers_are_folded_and_formats_have_words():
    assert [numbers for numbers, _ in fold_layers(TRAINING)] == [(), (0, 1, 2)]
    other = changed(decoder(layers=5), "layers.3.mlp.down", scale="fp32")
    assert [part["part"] for part in fold_to_json(other)] == ["model", "layers 0..2, 4", "layer 3"]
    assert format_title([7]) == "layer 7" and format_title([1, 2, 3, 5, 7, 8]) == "layers 1..3, 5, 7..8"
    assert str(X) == "e4m3 1x128 pow2" and str(HIGH) == "bf16"
    assert [str(unquantized_format(torch.empty(1, dtype=dtype))) for dtype in (torch.bfloat16, torch.int8)] == ["bf16", "int8"]


def test_graphs_are_whole_and_survive_json():
    """Every edge joins two nodes, every weight is trained, the key of an edge excludes its precision, an empty rollout lacks every node."""
    experts = decoder(trained=True, experts=4)
    for graph in (TRAINING, ROLLOUT, experts):
        names = {node.name for node in graph.nodes}
        assert len(names) == len(graph.nodes)
        assert {name for edge in graph.edges for name in (edge.source, edge.target)} == names
        assert GRAPH_JSON.validate_json(GRAPH_JSON.dump_json(graph)) == graph
    weights = {node.name for node in experts.nodes if node.op == "weight"}
    assert {edge.target for edge in experts.edges if edge.phase == "update"} == weights
    assert {edge.target.removesuffix(".master") for edge in experts.edges if edge.tensor == "grad"} == weights
    edge = Edge("a", "b", "x", HIGH)
    assert edge.key == replace(edge, format=X).key != replace(edge, tensor="weight").key
    one_layer = decoder(1)
    assert len(describe_differences(PrecisionGraph((), ()), one_layer)) == len(one_layer.nodes)


def test_pipeline_stages_make_the_whole_graph_and_ranks_that_disagree_are_refused():
    layers = {number: layer(True) for number in range(4)}
    ends = {"embedding": high(True).with_inputs(x=None), "norm": high(True), "lm_head": high(True)}
    stages = [({0, 1}, {"embedding"}), ({2, 3}, {"norm", "lm_head"}), (set(layers), set(ends))]
    first, last, expected = (
        decoder_graph(HIGH, {number: layers[number] for number in numbers}, {end: ends[end] for end in names}) for numbers, names in stages
    )
    result = merge_graphs([first, last])
    assert set(result.nodes) == set(expected.nodes)
    assert set(result.edges) == set(expected.edges)
    with pytest.raises(RunError, match=r"layers.1.mlp.swiglu -> layers.1.mlp.down \(x\): e4m3 1x128 pow2 and e4m3 1x128 fp32"):
        merge_graphs([ROLLOUT, changed(ROLLOUT, "layers.1.mlp.down", scale="fp32")])
    with pytest.raises(RunError, match="norm: norm and layer_norm"):
        merge_graphs([ROLLOUT, PrecisionGraph((Node("norm", "layer_norm"),), ())])
    with pytest.raises(RunError, match=r"about rope: turn \[table 1\] and turn \[table 2\]"):
        merge_graphs(PrecisionGraph((Node("rope", "rope", kernel=Kernel("turn", order=f"table {table}")),), ()) for table in (1, 2))


@pytest.mark.parametrize("expected, shapes", [
    ("128x128", [((256, 512), (2, 4)), ((300, 200), (3, 2)), ((128, 64), (1, 1)), ((8, 256, 512), (8, 2, 4))]),  # edges, experts
    ("64x64", [((256, 512), (4, 8))]),
    ("1x128", [((256, 512), (256, 4))]),
    ("1x512", [((256, 512), (256, 1))]),
    ("tensor", [((256, 512), ()), ((256, 512), (3,))]),
])  # fmt: skip
def test_the_block_of_one_scale_is_read_from_the_shapes(expected, shapes):
    for data, scale in shapes:
        assert block_format(torch.empty(data, dtype=torch.float8_e4m3fn), torch.ones(scale), "pow2").granularity == expected


def test_the_format_of_a_block_is_found_by_its_dtypes(monkeypatch):
    """Up to 32 columns, 1x32 and 1x128 blocks have grids of one shape."""
    monkeypatch.setitem(FORMATS, TOY.name, TOY)
    data, scale = torch.empty(256, 32, dtype=torch.float8_e4m3fn), torch.ones(256, 1)
    assert block_format(data, scale.byte(), "pow2") == TensorPrecision("e4m3", "1x32", "e8m0")
    assert block_format(data[:1], scale[:1], "pow2") == TensorPrecision("e4m3", "128x128", "pow2")


@pytest.mark.parametrize("wanted", ["pow2", "fp32"])
def test_the_scale_format_is_the_promised_one_and_values_must_keep_it(wanted):
    """FP32 scales may all be powers of two by chance, as in one block, in a rank that holds few blocks, or in an engine without weights."""
    data, scale = quantize_weight(torch.randn(256, 384, generator=torch.Generator().manual_seed(3)), wanted)
    assert block_format(data, scale, wanted) == TensorPrecision("e4m3", "128x128", wanted)
    assert block_format(data, scale.to(torch.bfloat16), wanted).scale == "bf16"
    assert check_scales(scale, wanted) == check_scales(torch.ones(2, 3), wanted) == wanted
    assert check_scales(scale * 1.1, wanted) == "fp32"
    for value in (torch.finfo(torch.float32).min, float("nan"), 0.0):
        scale[1, 1] = value
        assert check_scales(scale, wanted) == "invalid"


def test_int8_weights_have_a_scale_per_channel():
    """The GPU kernel keeps the weight transposed, but not its scales. Experts are stacked."""
    scale = torch.rand(256, 1) + 0.1
    for shape in ((256, 384), (384, 256)):
        assert channel_format(torch.zeros(shape, dtype=torch.int8), scale) == TensorPrecision("int8", "channel", "fp32")
    assert channel_format(torch.zeros(4, 256, 384, dtype=torch.int8), scale.expand(4, 256, 1)) == TensorPrecision("int8", "channel", "fp32")
    for other in (torch.ones(256, 3), torch.ones(100, 1), torch.ones(()), torch.ones(4, 256, 1)):
        with pytest.raises(ValueError, match="must have one scale per output channel"):
            channel_format(torch.zeros(256, 384, dtype=torch.int8), other)


def test_the_drawing_and_the_tables_show_every_forward_edge_and_red_only_for_differences():
    counts = {"1 difference": PLANTED["scale format"][0], "2 differences": PLANTED["an extra quantized layer"][0], "": ROLLOUT}
    for count, rollout in counts.items():
        svg = draw_svg(TRAINING, rollout)
        text = " ".join(element.text or "" for element in ElementTree.fromstring(svg).iter()).replace("\xa0", " ")
        words = ("attention.qkv", "mlp.down", "lm_head", "layers 0..2: forward", "e4m3 1x128 pow2", "mlp.down.wgrad")
        assert all(word in text for word in words) and "http" not in svg.replace("http://www.w3.org/2000/svg", "")
        assert (count in text and "is a subgraph" not in text) if count else "is a subgraph" in text
        assert ("#800000" in svg) == bool(count), "red"
    console = Console(record=True, width=200, file=io.StringIO())
    print_graphs(TRAINING, PLANTED["an extra quantized layer"][0], console)
    text = console.export_text()
    assert "layers 0..2: forward" in text and "layers 0..2: backward" in text
    (row,) = [line for line in text.splitlines() if line.startswith("norm -> lm_head (x)")]
    assert row.split() == ["norm", "->", "lm_head", "(x)", "bf16", "e4m3", "1x128", "pow2"]
    (row,) = [line for line in text.splitlines() if line.startswith("mlp.down.wgrad")]
    assert "x e4m3 128x1 pow2" in row and "dy e4m3 1x128 pow2" in row
