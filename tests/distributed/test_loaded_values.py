"""A new run's weights are compared with the checkpoint's by name: values that were loaded under another name are equal bytes on both sides
of a sync, and their names are paired rightly."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.exchanged import exchange
from support.families import ARCHITECTURES, QUANTIZED
from support.fp8_checkpoints import with_random_blocks
from support.models import edit_config, make_model, read_weights
from support.trainer import Trainer

from megatron_rl.errors import RunError
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.hf.stacks import ExpertSlice
from megatron_rl.sync import loaded_values
from megatron_rl.sync.loaded_values import LoadedValues
from megatron_rl.sync.plan import SyncPlan
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry

BF16, UNIFIED, ROLLOUT = {"mode": "bf16", "high": "bf16"}, {"mode": "fp8_unified", "high": "bf16"}, {"mode": "fp8_rollout", "high": "bf16"}
INT8, SPREAD = {"mode": "int8_rollout", "high": "bf16"}, {"masters": "spread"}
FP32_SCALES = {"mode": "fp8_unified", "high": "fp32", "scale_format": "fp32"}


def make_checks(folder, precision, layout, *exchanged):
    """Return the lines of two comparisons, the second of single blocks, after a load that exchanges two parts of names."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_into", "read_blocks") if exchanged else ():
            patch.setattr(HFCheckpoint, name, exchange(getattr(HFCheckpoint, name), *exchanged))
        trainer = Trainer(folder, precision, layout=layout)
    geometry, rank = ModelGeometry.from_hf_config(trainer.hf_config), dist.get_rank()
    shards = build_megatron_shards(geometry, trainer.layout, trainer.layout.coordinates(rank), format_of=trainer.contract.format_of)
    plan = SyncPlan((), (), {}, trainer.contract, {rank: shards})
    with pytest.MonkeyPatch.context() as patch:
        for whole in (1 << 16, 0):
            patch.setattr(loaded_values, "_WHOLE", whole)
            LoadedValues(plan, rank, folder, trainer.hf_config, lines.append).check(trainer.collect_named_tensors())
    return lines


def find_layout(name):
    if name == "gpt_oss":
        return Layout(tp=2, etp=1)
    return Layout(tp=2, ep=2, etp=1) if "moe" in name or name.startswith("deepseek") else Layout(tp=2)


PRECISIONS = [UNIFIED, BF16, ROLLOUT, INT8, FP32_SCALES, UNIFIED | SPREAD, ROLLOUT | SPREAD | {"high": "fp32"}]


@pytest.mark.default_cases(16)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_what_is_loaded_is_the_checkpoint(worlds, model_folder, name, precision):
    if name == "gpt_oss" and precision != BF16:
        pytest.skip("this family's weights stay in BF16")
    folder = model_folder(name)
    for lines in worlds(2).call(make_checks, folder, precision, find_layout(name)):
        assert len(lines) == 2 and all("hold the checkpoint's values" in line for line in lines)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", *(each for each in QUANTIZED if each not in ("qwen3", "qwen3_moe"))])
@pytest.mark.parametrize("precision", [UNIFIED, BF16, ROLLOUT, FP32_SCALES, UNIFIED | SPREAD], ids=str)
def test_what_is_loaded_is_the_fp8_checkpoint(worlds, tmp_path, name, precision):
    scales = "pow2" if precision.get("scale_format") != "fp32" else "fp32"
    folder = with_random_blocks(make_model(tmp_path / "model", ARCHITECTURES[name]), scales, seed=3)
    assert all(len(lines) == 2 for lines in worlds(2).call(make_checks, folder, precision, find_layout(name)))


def test_experts_in_mxfp4_are_read_part_by_part(worlds, tmp_path):
    folder, numbers = make_model(tmp_path / "model", ARCHITECTURES["gpt_oss"]), torch.Generator().manual_seed(3)
    tensors = read_weights(folder)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        for part, shape, low, high in (("blocks", (inputs // 32, 16), 0, 256), ("scales", (inputs // 32,), 115, 124)):
            tensors[f"{name}_{part}"] = torch.randint(low, high, (experts, outputs, *shape), generator=numbers, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, {"quantization_config": {"quant_method": "mxfp4"}})
    assert all(len(lines) == 2 for lines in worlds(2).call(make_checks, folder, BF16, find_layout("gpt_oss")))


def stack_experts(folder):
    """Store the experts of each layer as transformers 5 does."""
    tensors = read_weights(folder)
    for first in [name for name in tensors if name.endswith(".experts.0.down_proj.weight")]:
        experts, number = first.removesuffix(".0.down_proj.weight"), 0
        stacked = {"gate_up_proj": [], "down_proj": []}
        while f"{experts}.{number}.down_proj.weight" in tensors:
            gate, up, down = (tensors.pop(f"{experts}.{number}.{part}_proj.weight") for part in ("gate", "up", "down"))
            stacked["gate_up_proj"].append(torch.cat([gate, up]))
            stacked["down_proj"].append(down)
            number += 1
        tensors |= {f"{experts}.{name}": torch.stack(matrices) for name, matrices in stacked.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("precision", [UNIFIED, BF16], ids=str)
def test_experts_in_stacks_are_read_without_the_code_that_loads_them(worlds, tmp_path, precision):
    folder = stack_experts(make_model(tmp_path / "model", ARCHITECTURES["qwen3_moe"]))
    for lines in worlds(2).call(make_checks, folder, precision, find_layout("qwen3_moe")):
        assert len(lines) == 2
    with pytest.raises(RunError, match=r"should hold the checkpoint's \S*\.experts\.\d\.(gate|up)_proj\.weight from row 0, column 0, "):
        worlds(2).call(exchange_halves, folder, precision)


def exchange_halves(folder, precision):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertSlice, "__init__", _exchange_halves(ExpertSlice.__init__))
        make_checks(folder, precision, find_layout("qwen3_moe"))


def _exchange_halves(init):
    return lambda self, stack, expert, part: init(self, stack, expert, {"gate": "up", "up": "gate"}.get(part, part))


EXCHANGED = [
    ("qwen3", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"),
    ("qwen3", "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"),
    ("qwen3", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
    ("qwen3", "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"),
    ("qwen3", "layers.1.input_layernorm", "layers.1.post_attention_layernorm"),
    ("qwen3", "layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"),
    ("qwen3", "model.embed_tokens", "lm_head"),
    ("qwen3_moe", "layers.0.mlp.experts.1.up_proj", "layers.0.mlp.experts.2.up_proj"),
    ("qwen3_moe", "layers.0.mlp.experts.3.gate_proj", "layers.0.mlp.experts.3.up_proj"),
    ("qwen3_moe", "layers.2.mlp.experts.1.down_proj", "layers.3.mlp.experts.1.down_proj"),
    ("qwen3_moe", "layers.0.mlp.gate.", "layers.2.mlp.gate."),
]


@pytest.mark.default_cases(11)
@pytest.mark.parametrize("name, one, other", EXCHANGED, ids=[f"{one} {other}" for _, one, other in EXCHANGED])
@pytest.mark.parametrize("stored", ["fp32", "fp8"])
@pytest.mark.parametrize("precision", [UNIFIED, BF16], ids=str)
def test_values_that_were_loaded_under_another_name_are_named(worlds, tmp_path, name, one, other, precision, stored):
    folder = make_model(tmp_path / "model", ARCHITECTURES[name] | {"num_key_value_heads": 4})
    folder = with_random_blocks(folder, "pow2", seed=3) if stored == "fp8" else folder
    line = rf"^the sync is not proved: .* of trainer rank \d should hold the checkpoint's \S*({one}|{other})\S* from row \d+, column 0, "
    with pytest.raises(RunError, match=line):
        worlds(2).call(make_checks, folder, precision, find_layout(name), one, other)
