"""A gated delta net has one result in every layout, bit for bit, and the gradient of its formula in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import build_module
from support.families import parse_layout
from support.trainer import start

from megatron_rl.mcore.layers import spec
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.packed_sequences import make_packed_params
from megatron_rl.mcore.transformer_config import QuantizedTransformerConfig
from parallel.attention import GatedDeltaNet

HIDDEN, EPS = 64, 1e-6
KIND = GatedDeltaNet(k_heads=4, v_heads=8, k_dim=16, v_dim=64, taps=4)
LENGTHS = [1, 2, 3, 5, 64, 333, 40]
PADDED = [8, 16, 64, 336, 24]  # as context-parallel ranks need them
LARGE = ["tp2 cp2", "tp4 sp", "cp4"]
CUT = {"in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias"}


def make_parts(kind):
    """Return float32 parts of every parameter, each of which ranks cut by rows; of `out_proj` by columns."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=0.3):
        return scale * torch.randn(*shape, generator=generator)

    widths = (kind.k_width, kind.k_width, kind.v_width)
    return {
        "in_proj_qkvz.weight": [draw(rows, HIDDEN) for rows in (*widths, kind.v_width)],
        "in_proj_ba.weight": [draw(kind.v_heads, HIDDEN) for _ in "ba"],
        "conv1d.weight": [draw(rows, kind.taps) for rows in widths],
        "A_log": [draw(kind.v_heads, scale=1.0)],
        "dt_bias": [draw(kind.v_heads, scale=1.0)],
        "norm.weight": [1 + draw(kind.v_dim)],
        "out_proj.weight": [draw(HIDDEN, kind.v_width)],
    }


def inputs(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(lengths), 1, HIDDEN, generator=generator) for _ in range(2)]


def compute_formula(parts, kind, lengths):
    """Return the result and all gradients, computed by autograd in float64, one sequence and one token after the other."""
    weights = {name: torch.cat(part).double().requires_grad_() for name, part in parts.items()}
    x, dy = (values.double().squeeze(1) for values in inputs(lengths))
    x.requires_grad_()
    rows = [_compute_sequence(weights, kind, sequence) for sequence in x.split(lengths)]
    y = torch.cat(rows)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{name: weight.grad for name, weight in weights.items()}}


def _compute_sequence(weights, kind, x):
    mixed, z = (x @ weights["in_proj_qkvz.weight"].t()).split([kind.channels, kind.v_width], -1)
    b, a = (x @ weights["in_proj_ba.weight"].t()).chunk(2, -1)
    padded = F.pad(mixed.t(), (kind.taps - 1, 0))
    mixed = F.silu(F.conv1d(padded, weights["conv1d.weight"].unsqueeze(1), groups=kind.channels)).t()
    q, k, v = mixed.split([kind.k_width, kind.k_width, kind.v_width], -1)
    q, k = (part.view(len(x), kind.k_heads, kind.k_dim) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(kind.v_heads // kind.k_heads, 1) for part in (q, k))
    v, beta = v.view(len(x), kind.v_heads, kind.v_dim), b.sigmoid()
    decay = (-weights["A_log"].exp() * F.softplus(a + weights["dt_bias"])).exp()
    state, out = x.new_zeros(kind.v_heads, kind.k_dim, kind.v_dim), []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * kind.k_dim**-0.5)
    normed = F.rms_norm(torch.stack(out), (kind.v_dim,), weights["norm.weight"], EPS) * F.silu(z.view(len(x), kind.v_heads, -1))
    return normed.flatten(1) @ weights["out_proj.weight"].t()


def run_layer(parts, kind, lengths, layout, sequence_parallel):
    """Return this rank's result and gradients of a layer: [t / cp, h] of whole sequences, and its parts of the weights."""
    start(layout)
    config = QuantizedTransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, layernorm_epsilon=EPS, add_bias_linear=False, perform_initialization=False,
        use_cpu_initialization=True, tensor_model_parallel_size=layout.tp, context_parallel_size=layout.cp, attention=(kind,),
        sequence_parallel=sequence_parallel, gradient_accumulation_fusion=False,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    layer = build_module(spec._gated_delta_net(config, spec._SpecProvider(config)), config=config, layer_number=1, pg_collection=groups)
    rank = groups.tp.rank()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            cut = name in CUT or name == "out_proj.weight"
            own = [part.chunk(layout.tp, int(name == "out_proj.weight"))[rank] if cut else part for part in parts[name]]
            parameter.copy_(torch.cat(own))
    x, dy = inputs(lengths)
    shard = ContextShard.for_this_rank(lengths)
    if layout.cp > 1:
        x, dy = x[shard.own_positions], dy[shard.own_positions]
    if sequence_parallel:
        x = x.chunk(layout.tp)[rank]
    row = make_packed_params(lengths, shard, shard.own_positions.unsqueeze(0))
    x = x.clone().requires_grad_()
    y, bias = layer(x, packed_seq_params=row)
    assert bias is None
    y = gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False, group=groups.tp) if sequence_parallel else y
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
    return found | {"positions": shard.own_positions}


def join(kind, layout, sequence_parallel, results):
    """Return the whole result and gradients of the ranks' parts; gradients of context-parallel ranks are added."""
    places = [layout.coordinates(rank) for rank in range(len(results))]
    by_tp = [[result for result, place in zip(results, places, strict=True) if place.tp == tp] for tp in range(layout.tp)]
    order = torch.cat([part["positions"] for part in by_tp[0]]).argsort()
    whole = {"y": torch.cat([part["y"].squeeze(1) for part in by_tp[0]])[order]}
    if sequence_parallel:
        whole["x"] = torch.cat([ranks[0]["x"] for ranks in by_tp]).squeeze(1)
    else:
        whole["x"] = torch.cat([part["x"].squeeze(1) for part in by_tp[0]])[order]
    sums = [{name: sum(part[name] for part in ranks) for name in make_parts(kind)} for ranks in by_tp]
    for name, parts in make_parts(kind).items():
        if name == "norm.weight":
            whole[name] = sums[0][name]
        elif name == "out_proj.weight":
            whole[name] = torch.cat([each[name] for each in sums], 1)
        else:
            sizes = [len(part) // layout.tp for part in parts]
            whole[name] = torch.cat([torch.cat(pieces) for pieces in zip(*(each[name].split(sizes) for each in sums), strict=True)])
    return whole


@pytest.fixture(scope="module")
def expected():
    """`expected(lengths)`: what `compute_formula` returns, computed once."""
    return functools.cache(lambda lengths: compute_formula(make_parts(KIND), KIND, list(lengths)))


@pytest.mark.parametrize("name", ["tp1", "tp2", "tp2 sp", "cp2", *(pytest.param(name, marks=pytest.mark.long) for name in LARGE)])
def test_results_are_equal_and_gradients_those_of_float64(worlds, expected, name):
    layout, sequence_parallel = parse_layout(name.removesuffix(" sp")), name.endswith("sp")
    lengths = PADDED if layout.cp > 1 else LENGTHS
    results = worlds(layout.world_size).call(run_layer, make_parts(KIND), KIND, lengths, layout, sequence_parallel)
    found = join(KIND, layout, sequence_parallel, results)
    alone = worlds(1).call(run_layer, make_parts(KIND), KIND, lengths, parse_layout("tp1"), False)[0]
    assert torch.equal(found["y"], alone["y"].squeeze(1))
    for key, value in expected(tuple(lengths)).items():
        assert (found[key] - value).norm() < 1e-5 * value.norm(), key  # tokens with small outputs have large gradients
