"""Every tensor of a live model is found, and accounted for or refused by name."""

import functools
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.precision.fp8 import dequantize_weight, quantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.chunking import Chunk, encode_chunks
from rollout_sglang import derived_tensors, precision_graph, rank_handler
from rollout_sglang.derived_tensors import ServedTensors, find_tensors
from rollout_sglang.hooks import dequant_cache, e4m3_cache
from rollout_sglang.rank_handler import RankHandler, live_tensors

HEADS, KEYS, VALUES, LATENT = 2, 128, 256, 128


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Write into the tensor of this name, or add it."""
    if hasattr(module, name):
        getattr(module, name).copy_(tensor)
    else:
        setattr(module, name, tensor)


class Model(torch.nn.Module):
    """An attention layer as SGLang leaves it after its post-load hooks."""

    def __init__(self, kind: str = "fp8") -> None:
        super().__init__()
        self.attn = attn = torch.nn.Module()
        attn.kv_b_proj, attn.rotary_emb = torch.nn.Module(), torch.nn.Module()
        attn.qk_nope_head_dim, attn.v_head_dim, attn.use_deep_gemm_bmm = KEYS, VALUES, kind == "deep_gemm"
        attn.k_scale = parameter(torch.ones(()))
        attn.rotary_emb.register_buffer("cos_sin_cache", torch.arange(64.0).view(8, 8), persistent=False)
        attn.kv_b_proj.bias = None
        attn.quant_method = SimpleNamespace(workspace=torch.empty(16), c_strides1=torch.arange(4))
        self.write(kind, seed=0)
        self.post_load(kind)

    def write(self, kind: str, seed: int) -> None:
        """Write new weights in place, as a sync does."""
        weight = torch.randn(HEADS * (KEYS + VALUES), LATENT, generator=torch.Generator().manual_seed(seed))
        layer = self.attn.kv_b_proj
        if kind == "bf16":
            tensors = {"weight": weight.bfloat16()}
        elif kind == "int8":
            tensors = {"weight": (weight * 30).to(torch.int8), "weight_scale": weight.abs().amax(1, True)}
        else:
            data, scale = quantize_weight(weight, "fp32")
            tensors = {"weight": data, "weight_scale_inv": scale}
        for name, tensor in tensors.items():
            put(layer, name, parameter(tensor))

    def post_load(self, kind: str) -> None:
        """Do what SGLang 0.5.23's `DeepseekV2WeightLoaderMixin.post_load_weights` does (`test_the_real_hook` runs the real one)."""
        layer, attn = self.attn.kv_b_proj, self.attn
        w = layer.weight
        if kind == "fp8":
            w = dequantize_weight(QuantizedWeight(layer.weight, layer.weight_scale_inv)).bfloat16()
        if kind == "int8":
            w = w.to(torch.bfloat16) * layer.weight_scale.to(torch.bfloat16)
        w_kc, w_vc = w.unflatten(0, (HEADS, KEYS + VALUES)).split([KEYS, VALUES], dim=1)
        made = {"w_kc": w_kc.transpose(1, 2).contiguous().transpose(1, 2), "w_vc": w_vc.contiguous().transpose(1, 2)}
        if kind == "deep_gemm":
            ws_kc, ws_vc = layer.weight_scale_inv.unflatten(0, (-1, 3)).split([1, 2], dim=1)
            made = {"w_kc": w_kc.transpose(1, 2).contiguous(), "w_vc": w_vc.contiguous()}
            made |= {"w_scale_k": ws_kc.transpose(1, 2).contiguous(), "w_scale_v": ws_vc.contiguous()}
        for name, tensor in made.items():
            put(attn, name, tensor.clone())


def check(served: ServedTensors, model: torch.nn.Module) -> dict[str, int]:
    return served.check(model, live_tensors(model))


@pytest.mark.parametrize("kind, derived", [("fp8", 2), ("deep_gemm", 4), ("int8", 2), ("bf16", 2)])
def test_tensors_derived_from_proved_bytes_are_recomputed_and_compared(kind, derived):
    model = Model(kind)
    served = ServedTensors(model)
    assert check(served, model) == {"proved": 1 if kind == "bf16" else 2, "derived": derived, "constant": 3}
    model.write(kind, seed=1)  # a sync whose post-load hook is skipped
    line = r"^attn\.w_kc is stale: \d+ of its 32768 values differ from those computed from the proved bytes$"
    with pytest.raises(ValueError, match=line):
        check(served, model)
    old_scales = model.attn.w_scale_v.clone() if kind == "deep_gemm" else None
    model.post_load(kind)
    check(served, model)
    if old_scales is not None:  # stale, though the bytes are new
        model.attn.w_scale_v.copy_(old_scales)
        with pytest.raises(ValueError, match=r"attn\.w_scale_v is stale: 4 of its 4 values"):
            check(served, model)
        model.post_load(kind)
    model.attn.w_vc[1, 5, 7] = 17
    with pytest.raises(ValueError, match=r"attn\.w_vc is stale: 1 of its 65536"):
        check(served, model)


def close_over(copy: torch.Tensor) -> functools.partial:
    return functools.partial(lambda x, y: x + y + copy, 1)


@pytest.mark.parametrize("owner, name, value, line", [
    ("", "w_new", torch.ones(3), r"w_new \(float32 \[3\]\) is neither filled by the sync nor known to rollout_sglang/derived_tensors\.py"),
    ("quant_method", "packed", [{"low": torch.ones(2, dtype=torch.int32)}], r"quant_method\.packed\.0\.low \(int32 \[2\]\) is neither"),
    ("kv_b_proj.weight", "_shuffled", torch.ones(2), r"kv_b_proj\.weight\._shuffled \(float32 \[2\]\) is neither"),
    ("", "apply", close_over(torch.ones(4)), r"apply\.func\.copy \(float32 \[4\]\) is neither"),
    ("", "extra", parameter(torch.ones(2)), r"extra \(float32 \[2\]\) is neither"),
])  # fmt: skip
def test_a_tensor_that_nobody_knows_is_refused_by_name(owner, name, value, line):
    model = Model()
    served, proved = ServedTensors(model), live_tensors(model)
    setattr(operator.attrgetter(owner)(model.attn) if owner else model.attn, name, value)
    with pytest.raises(ValueError, match=rf"attn\.{line}"):
        served.check(model, proved)


def test_constants_stay_and_no_tensor_moves():
    model = Model()
    served = ServedTensors(model)
    model.attn.rotary_emb.cos_sin_cache[3, 3] = 0
    with pytest.raises(ValueError, match=r"attn\.rotary_emb\.cos_sin_cache is a constant, but has changed since the engine started"):
        check(served, model)
    model.attn.rotary_emb.cos_sin_cache[3, 3] = 27
    model.attn.quant_method.workspace.fill_(5)  # scratch
    check(served, model)
    moved = model.attn.w_kc = model.attn.w_kc.clone()  # as a hook that assigns where it should copy
    with pytest.raises(ValueError, match=r"attn\.w_kc has moved in memory since the engine started: CUDA graphs read its old address"):
        check(served, model)
    assert moved.shape == (HEADS, KEYS, LATENT)


def test_views_of_proved_memory_are_proved_and_every_tensor_is_found_once():
    model = Model()
    model.tied = model.attn.kv_b_proj.weight.t()[:5]
    model.again = [model.attn.kv_b_proj]
    paths = [found.path for found in find_tensors(model)]
    assert len(paths) == len(set(paths)) and "tied" in paths and not any(path.startswith("again") for path in paths)
    assert check(ServedTensors(model), model)["proved"] == 3


def test_a_tensor_of_which_several_proved_tensors_are_parts_is_proved():
    model, packed = torch.nn.Module(), torch.randn(6, LATENT)
    model.first, model.second, model.packed = parameter(packed[:4]), parameter(packed[4:]), packed
    assert ServedTensors(model).check(model, live_tensors(model)) == {"proved": 3, "derived": 0, "constant": 0}
    model.packed = torch.cat([packed, packed])
    with pytest.raises(ValueError, match="packed .* is neither filled"):
        ServedTensors(model).check(model, live_tensors(model))


def test_float_values_that_were_kept_are_those_of_the_proved_bytes():
    model = Model("int8")
    served, layer = ServedTensors(model), model.attn.kv_b_proj
    dequant_cache.clear_cache()
    try:
        dequant_cache.get_float_weight(layer.weight, layer.weight.float)
        assert check(served, model)["derived"] == 3
        model.write("int8", seed=1)
        model.post_load("int8")
        with pytest.raises(ValueError, match=r"cached float values of a weight \[768, 128\] are stale"):
            check(served, model)
    finally:
        dequant_cache.clear_cache()


def test_float_values_made_since_the_sync_are_recomputed_in_turn(monkeypatch):
    model, weights = torch.nn.Module(), [parameter(torch.full((4, 8), value, dtype=torch.int8)) for value in range(3)]
    model.weights = torch.nn.ParameterList(weights)
    served, made = ServedTensors(model), []

    def make(number: int) -> torch.Tensor:
        made.append(number)
        return weights[number].float()

    dequant_cache.clear_cache()
    monkeypatch.setattr(derived_tensors, "COPIES_BYTES", 2 * 4 * 8 * 4)
    try:
        assert served.check_copies(live_tensors(model)) == 0, "no layer has computed yet"
        kept = [dequant_cache.get_float_weight(weight, functools.partial(make, number)) for number, weight in enumerate(weights)]
        made.clear()
        assert [served.check_copies(live_tensors(model)) for _ in range(3)] == [2, 2, 2] and sorted(made) == [0, 0, 1, 1, 2, 2]
        kept[1][2, 3] += 1
        with pytest.raises(ValueError, match=r"cached float values of a weight \[4, 8\] are stale"):
            [served.check_copies(live_tensors(model)) for _ in range(2)]  # within two syncs
    finally:
        dequant_cache.clear_cache()


@pytest.mark.parametrize("promised", ["ue8m0", None])
def test_scales_of_the_last_sync_have_the_format_that_the_graph_states(promised):
    model, layer = Model(), torch.nn.Module()
    model.layer, layer.quant_method = layer, SimpleNamespace(quant_config=SimpleNamespace(scale_fmt=promised))
    layer.weight, layer.w2_weight_scale_inv = parameter(torch.ones(256, 128)), parameter(torch.tensor([[[0.5]], [[2.0]]]))
    layer.weight_scale_inv = parameter(torch.tensor([[0.25], [4.0]]))
    precision_graph.check_scale_values(model)
    layer.w2_weight_scale_inv[1] = 0.3
    if promised is None:
        precision_graph.check_scale_values(model)
    else:
        with pytest.raises(ValueError, match=r"^layer\.w2_weight_scale_inv holds scales that are fp32, but the precision graph says pow2$"):
            precision_graph.check_scale_values(model)
    layer.w2_weight_scale_inv[1] = 0.0
    line = rf"^layer\.w2_weight_scale_inv holds scales that are invalid, but the precision graph says {'pow2' if promised else 'fp32'}$"
    with pytest.raises(ValueError, match=line):
        precision_graph.check_scale_values(model)
    layer.w2_weight_scale_inv[1] = 1.0
    model.attn.kv_scales = parameter(torch.tensor([1.0, 0.7]))
    with pytest.raises(ValueError, match=r"^attn\.kv_scales holds scales that are fp32"):
        precision_graph.check_scale_values(model)


def test_one_plus_a_norms_weight_is_stale_until_it_is_refreshed():
    """SGLang's `GemmaRMSNorm` keeps 1 + weight, which its loader alone recomputes."""
    model = torch.nn.Module()
    model.norm = norm = torch.nn.Module()
    norm.weight = parameter(torch.randn(KEYS))
    norm.register_buffer("gemma_weight", torch.ones(KEYS))
    norm.refresh_gemma_weight = lambda: norm.gemma_weight.copy_(norm.weight).add_(1.0)
    served = ServedTensors(model)
    with pytest.raises(ValueError, match=f"norm.gemma_weight is stale: {KEYS} of its {KEYS} values differ"):
        served.check(model, live_tensors(model))
    derived_tensors.refresh(model)
    assert served.check(model, live_tensors(model)) == {"proved": 1, "derived": 1, "constant": 0}


def test_the_rank_reports_wrong_tensors(monkeypatch):
    model, handler = Model(), RankHandler()
    cache = SimpleNamespace(size=64, available_size=lambda: 60)
    states = SimpleNamespace(size=8, available_size=lambda: 7)
    requests = SimpleNamespace(mamba_allocator=states)
    runner: Any = SimpleNamespace(model=model, token_to_kv_pool_allocator=cache, req_to_token_pool=requests)
    monkeypatch.setattr(rank_handler, "WeightReceiver", lambda *_: SimpleNamespace())
    link = {"transport": "disk", "addresses": {}, "sources": [], "targets": [], "chunk_bytes": 1, "timeout": 1.0}
    monkeypatch.setattr(rank_handler, "Link", lambda **_: None)
    model.attn.kv_scales = parameter(torch.ones(2))
    sizes = {name: (tensor.shape[0], tensor.numel() // tensor.shape[0]) for name, tensor in live_tensors(model).items()}
    chunk = [0, 0, 1, [[name, 0, 0, rows, cols] for name, (rows, cols) in sizes.items()]]
    handler.answer(
        {"verb": "connect", "link": link, "staged": False, "ranks": {"0": encode_chunks([Chunk.from_json(0, chunk)])}}, 0, runner
    )
    line = "the KV cache was not flushed: it holds 4 tokens of the previous weights"
    assert handler.answer({"verb": "served"}, 0, runner) == {"wrong": line}
    cache.available_size = lambda: 64
    line = "recurrent states were not flushed: 1 slots hold states of the previous weights"
    assert handler.answer({"verb": "served"}, 0, runner) == {"wrong": line}
    states.available_size = lambda: 8
    size = {"tensors": "3", "bytes": str(768 * 128 + 4 * 6 + 4 * 2), "copies": "0"}
    assert handler.answer({"verb": "served"}, 0, runner) == {**size, "proved": "3", "derived": "2", "constant": "3"}
    model.write("fp8", seed=1)
    assert "attn.w_kc is stale" in handler.answer({"verb": "served"}, 0, runner)["wrong"]
    monkeypatch.setattr(e4m3_cache, "scales_by_layer", lambda: True)
    model.attn.k_scale_float = 0.5
    assert handler.answer({"verb": "served"}, 0, runner)["wrong"].startswith("attn.k_scale_float is 0.5, not 1: kernels would multiply")
