"""Hooks on gated delta nets: the order of projected rows, the slots that a batch reads and writes, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
from megatron_rl.kernels.gated_delta.reference import attend
from megatron_rl.kernels.gates.reference import gate
from rollout_sglang.hooks import gated_delta, startup

HEADS = DeltaHeads(2, 6, 8, 4)
SIZES = HEADS.k, HEADS.v, HEADS.k_dim, HEADS.v_dim
CHANNELS, TAPS, SLOTS = sum(HEADS.widths), 4, 5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_both_orders_of_projected_rows_give_the_same_parts():
    q, k = random(3, HEADS.k, HEADS.k_dim), random(3, HEADS.k, HEADS.k_dim, seed=1)
    v, z = (random(3, HEADS.v, HEADS.v_dim, seed=seed) for seed in (2, 3))
    b, a = (random(3, HEADS.v, seed=seed) for seed in (4, 5))
    by_kind = torch.cat([part.flatten(1) for part in (q, k, v, z)], 1), torch.cat([b, a], 1)
    ratio = HEADS.v // HEADS.k
    rows, gates = [], []
    for head in range(HEADS.k):
        own = slice(head * ratio, (head + 1) * ratio)
        rows += [q[:, head], k[:, head], v[:, own].flatten(1), z[:, own].flatten(1)]
        gates += [b[:, own], a[:, own]]
    wanted = torch.cat([part.flatten(1) for part in (q, k, v)], 1), z, b, a
    grouped = gated_delta.split_grouped(torch.cat(rows, 1), torch.cat(gates, 1), *SIZES)
    for parts in (gated_delta.split_contiguous(*by_kind, *SIZES), grouped):
        assert all(torch.equal(part, other) for part, other in zip(parts, wanted, strict=True))


def test_an_engine_has_layers_in_the_order_of_the_config():
    class Config:
        layers_block_type = property(lambda self: [self.full_attention_interval])  # SGLang's, which counts

        def __init__(self, full_attention_interval=4, layer_types=None):
            self.full_attention_interval = full_attention_interval

    def make(**fields):
        config = object.__new__(type("Child", (Config,), {}))
        startup.keep_layer_types(Config.__init__, config, **fields)
        return config

    assert make().layers_block_type == [4]
    for types in (["full_attention", "linear_attention", "linear_attention"], ["linear_attention", "full_attention", "full_attention"]):
        config = make(layer_types=types)
        assert config.layers_block_type == [name.replace("full_", "") for name in types]
        assert config.full_attention_interval == 1 + types.index("full_attention")
    assert make(full_attention_interval=3).layers_block_type == [3], "a config without layer_types, after one with them"


class Engine:
    """What the hooks see of SGLang: a pool with what earlier requests left, and a layer."""

    def __init__(self, dtype=torch.float32, windows=None, states=torch.float32):
        self.cache = cache = SimpleNamespace(
            conv=[torch.full((SLOTS, CHANNELS, TAPS - 1), 9.0, dtype=windows or dtype)],
            temporal=torch.full((SLOTS, HEADS.v, HEADS.v_dim, HEADS.k_dim), 9.0, dtype=states),
        )
        self.layer = SimpleNamespace(
            layer_id=0, num_k_heads=HEADS.k, num_v_heads=HEADS.v, head_k_dim=HEADS.k_dim, head_v_dim=HEADS.v_dim,
            conv_weights=random(CHANNELS, TAPS, seed=6).to(dtype), A_log=random(HEADS.v, seed=7), dt_bias=random(HEADS.v, seed=8),
        )  # fmt: skip
        self.backend = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda _: cache), mis_metadata=None, forward_metadata=None
        )
        self.weights = DeltaWeights(self.layer.conv_weights, self.layer.A_log, self.layer.dt_bias, HEADS)

    def _plan(self, slots, tracked=False):
        self.backend.forward_metadata = SimpleNamespace(mamba_cache_indices=torch.tensor(slots).int(), has_mamba_track_mask=tracked)

    def extend(self, slots, prefixes, lengths, inputs, tracked=False):
        self._plan(slots, tracked)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: False),
            extend_prefix_lens=torch.tensor(prefixes),
            extend_seq_lens_cpu=lengths,
        )
        return gated_delta.extend(self.backend, self.layer, batch, *inputs)[0]

    def decode(self, slots, inputs, track=None, whole=False):
        self._plan(slots)
        result = gated_delta.decode(self.backend, self.layer, SimpleNamespace(mamba_track_mask=track), *inputs)
        return result if whole else result[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_decoded_tokens_continue_in_their_slots(dtype):
    engine, tokens = Engine(dtype), {3: 9, 1: 6}  # slot -> tokens of its request
    inputs = {
        slot: [random(count, width, seed=slot + width).to(dtype) for width in (CHANNELS, HEADS.v, HEADS.v)]
        for slot, count in tokens.items()
    }
    whole = {slot: attend(engine.weights, *own, [tokens[slot]]) for slot, own in inputs.items()}

    def take(*parts):
        return [torch.cat([inputs[slot][which][start:end] for slot, start, end in parts]) for which in range(3)]

    first = engine.extend([3, 1], [0, 0], [4, 5], take((3, 0, 4), (1, 0, 5)))
    second = engine.extend([3], [4], [4], take((3, 4, 8)))
    padded = [torch.cat([rows, rows[:1]]) for rows in take((1, 5, 6), (3, 8, 9))]  # as a CUDA graph pads a batch
    last = engine.decode([1, 3, -1], padded)[:2]
    assert engine.cache.temporal[[2, 4]].eq(9).all(), "states of others stay"
    assert torch.equal(torch.cat([first[:4], second, last[1:]]), whole[3])
    assert torch.equal(torch.cat([first[4:], last[:1]]), whole[1])


def test_projections_that_sglang_splits_with_the_convolution_are_split():
    engine, other = Engine(), Engine()
    mixed, z, b, a = parts = [random(2, width, seed=width) for width in (CHANNELS, HEADS.v * HEADS.v_dim, HEADS.v, HEADS.v)]
    wanted = other.decode([1, 3], [mixed, a, b])
    out, gates = engine.decode([1, 3], [(torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)), None, None], whole=True)
    assert torch.equal(out[0], wanted) and torch.equal(gates.flatten(1), z)


@pytest.mark.parametrize("formats", [{"windows": torch.bfloat16}, {"states": torch.bfloat16}, {"states": torch.float16}])
def test_a_pool_that_rounds_is_refused(formats):
    engine = Engine(**formats)
    inputs = [random(1, width) for width in (CHANNELS, HEADS.v, HEADS.v)]
    with pytest.raises(ValueError, match=r"the engine keeps convolution windows in .*, not in torch.float32 and torch.float32"):
        engine.decode([1], inputs)


def test_states_inside_of_a_part_and_other_norms_are_refused():
    inputs = [random(1, width) for width in (CHANNELS, HEADS.v, HEADS.v)]
    with pytest.raises(NotImplementedError, match="extra_buffer"):
        Engine().extend([1], [0], [1], inputs, tracked=True)
    with pytest.raises(NotImplementedError, match="extra_buffer"):
        Engine().decode([1], inputs, track=torch.ones(1).bool())
    norm = SimpleNamespace(activation="sigmoid", weight=torch.ones(4), eps=1e-6)
    with pytest.raises(NotImplementedError, match=r"other than rms_norm\(x\) \* silu\(z\)"):
        gated_delta.gate_norm(norm, random(2, 4), random(2, 4))


def test_gates_round_once():
    x, weight, shared, total = (random(5, 16, seed=seed).bfloat16() for seed in range(4))
    attention = SimpleNamespace(
        forward_prepare_native=lambda *_: (x, x, x, total.view(5, 4, 4)), attn=lambda q, *_: q, o_proj=lambda y: (y, None)
    )
    assert torch.equal(gated_delta.attend_with_gate(attention, None, x, None), gate(x, total))
    added = total.clone()
    gated_delta.add_gated_shared_expert(x, weight[0], shared, added)
    score = (x.float() @ weight[0].float()).bfloat16()
    assert torch.equal(added, total + gate(shared, score[:, None]))
