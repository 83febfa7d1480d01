"""The engine's adapters: what experts add by either order of sums, and what a rank reads of a file."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.families import ENGINE_ARCHITECTURES
from support.kernel_tests import random

from megatron_rl.config.lora import LoraConfig
from megatron_rl.kernels.linear.reference import project_down, project_up
from parallel.adapters import ENGINE_FILE, NAMES, is_adapter
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_sglang_shards
from rollout_sglang.hooks import adapters, cpu_moe, startup
from rollout_sglang.hooks.cpu_kernels import multiply_plain

LORA = LoraConfig(rank=8, alpha=16.0)
EXPERTS, HIDDEN, FFN = 3, 24, 16


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv(adapters.LORA_VARIABLE, adapters.describe(LORA.rank, LORA.scale, LORA.targets))
    adapters.read_settings.cache_clear()
    yield
    adapters.read_settings.cache_clear()


@pytest.mark.parametrize("tree", [True, False])
def test_experts_add_their_own_adapters_before_the_tokens_weight(monkeypatch, tree):
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(cpu_moe, "get_ranks", lambda: SimpleNamespace(moe_tp_group=group, moe_ep_group=group, tp_group=group))
    w13, w2 = random(EXPERTS, 2 * FFN, HIDDEN, seed=1), random(EXPERTS, HIDDEN, FFN, seed=2)
    shapes = {"w13_lora_A": (8, HIDDEN), "w13_lora_B": (2 * FFN, 8), "w2_lora_A": (8, FFN), "w2_lora_B": (HIDDEN, 8)}
    layer = SimpleNamespace(**{name: random(EXPERTS, *shape, seed=number) for number, (name, shape) in enumerate(shapes.items(), 3)})
    x, chosen = random(5, HIDDEN, seed=7), torch.tensor([[2, 0], [1, 2], [2, 1], [0, -1], [-1, -1]])
    weights = random(5, 2, seed=8).softmax(-1)

    def linear(weight: torch.Tensor) -> adapters.ExpertLinear:
        return lambda rows, expert: multiply_plain(rows, weight[expert])

    first = adapters.adapt_experts(layer, "w13", linear(w13))
    last, up = adapters.adapt_partial_sums(layer, linear(w2)) if tree else (adapters.adapt_experts(layer, "w2", linear(w2)), None)
    y = cpu_moe.run_experts(x, weights, chosen, first, last, EXPERTS, tree, up)

    def adapted(rows: torch.Tensor, weight: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        down, back = (getattr(layer, f"{name}_{part}")[expert] for part in NAMES)
        return rows @ weight[expert].t() + project_up(project_down(rows, down), back, LORA.scale)

    expected = torch.zeros_like(x)
    for token, choice in (chosen >= 0).nonzero().tolist():
        gate, other = adapted(x[token : token + 1], w13, "w13", expert := int(chosen[token, choice])).chunk(2, -1)
        expected[token] += weights[token, choice] * adapted(F.silu(gate) * other, w2, "w2", expert)[0]
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    assert not y[4].any()


@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (2, 2)])
def test_a_rank_reads_its_part_of_a_file(monkeypatch, tmp_path, tp, ep):
    config = ENGINE_ARCHITECTURES["qwen3_moe"]
    model = LORA.adapt(ModelGeometry.from_hf_config(config))
    assert adapters.read_settings()["rank"] == model.adapters.rank and adapters.read_settings()["targets"] == [*model.adapters.targets]
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [tensor for name, tensor in model.tensors().items() if is_adapter(name.removesuffix(".weight"))]
    tensors = {tensor.name: random(tensor.rows, tensor.cols, seed=seed) for seed, tensor in enumerate(names)}
    (tmp_path / ENGINE_FILE).parent.mkdir()
    save_file(tensors, tmp_path / ENGINE_FILE)
    read = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for rank in range(tp):
        shards = [shard for shard in build_sglang_shards(model, tp, rank, ep) if is_adapter(shard.name)]
        live = {shard.name: torch.zeros(shard.shape) for shard in shards}
        groups = {"tp_group": SimpleNamespace(world_size=tp, rank_in_group=rank), "moe_ep_group": SimpleNamespace(world_size=ep)}
        parallel = SimpleNamespace(get_parallel=lambda groups=groups: SimpleNamespace(**groups))
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", parallel)
        monkeypatch.setattr(startup, "live_tensors", lambda _, live=live: live)
        startup.load_adapters(lambda _, model_config: torch.nn.Module(), None, model_config=SimpleNamespace(model_path=tmp_path))
        for shard in shards:
            for region in shard.regions:
                view_rect(read[region.tensor.name], region.tensor_rect).copy_(view_rect(live[shard.name], region.shard_rect))
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
