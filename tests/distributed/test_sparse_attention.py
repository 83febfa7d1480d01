"""DeepSeek-V3.2 and GLM-5: the function of transformers up to index_topk tokens, another one beyond, and indexers that stay as they are."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import trainer, transformers_reference
from support.families import CLASSES
from support.fp8_checkpoints import add_mtp_layer, find_changed, with_random_blocks
from support.golden import slow_fp8
from support.models import FP32, random_sequences, read_weights
from transformers import AutoModelForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.evaluation.checkpoint import EvalCheckpoint
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.checkpoint.export import convert
from megatron_rl.mcore.checkpoint.folder import find_damage
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

FAMILIES = ("deepseek_v32", "glm_moe_dsa")
TOPK = 64
SHARED = ["full", "shared", "full", "shared"]
EVEN = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 2)
"""Sequence parallelism, which experts need, cuts the batch's width: it is even with this seed."""


def take_indexers(tensors):
    found = {name: tensor for name, tensor in tensors.items() if ".indexer." in name}
    assert len({name.removesuffix("_scale_inv") for name in found}) % 5 == 0 and found
    return found


def load_by_transformers(folder):
    """Return the class of the model, the names that transformers misses or does not know, and the tensors of its indexers."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, local_files_only=True)
    unfit = {key: sorted(names) for key, names in info.items() if names}
    return type(model).__name__, unfit, {name: tensor for name, tensor in model.state_dict().items() if ".indexer." in name}


@pytest.mark.parametrize(
    "family, changes",
    [*((family, {}) for family in FAMILIES), ("glm_moe_dsa", {"indexer_types": SHARED})],
    ids=[*FAMILIES, "glm_moe_dsa with shared indexers"],
)
def test_it_is_the_function_of_transformers_up_to_topk_tokens_alone(family, changes, model_folder, worlds, transformers_process, capsys):
    folder = model_folder(family, index_topk=TOPK, **changes)
    ids = torch.randint(0, 384, (3, TOPK + 16), generator=torch.Generator().manual_seed(5)).tolist()
    ours = worlds(1).call(trainer.logits, folder, FP32, ids)[0]
    expected = transformers_process.call(transformers_reference.logits, folder, ids)[0]
    assert expected.std() > 0.1

    def differ(tokens):
        return ((ours - expected)[:, tokens].square().mean() / expected[:, tokens].square().mean()).sqrt()

    with capsys.disabled():
        print(f"\n{family}: relative RMS difference of logits of tokens up to {TOPK}: {differ(slice(TOPK)):.1e}")
    assert differ(slice(TOPK)) < 2e-6 < 1e-3 < differ(slice(TOPK, None))


@pytest.mark.parametrize(
    "family, layout, changes",
    [
        ("deepseek_v32", Layout(tp=2), {}),
        ("glm_moe_dsa", Layout(pp=2), {}),
        pytest.param("glm_moe_dsa", Layout(pp=2), {"indexer_types": SHARED[:2]}, id="glm_moe_dsa with shared indexers"),
    ],
)
def test_a_run_keeps_them_byte_for_byte_and_its_export_loads_in_transformers(
    family, layout, changes, model_folder, worlds, transformers_process, tmp_path
):
    source, run = model_folder(family, num_hidden_layers=2, **changes), tmp_path / "step_00001"
    indexers = take_indexers(read_weights(source))
    worlds(2).call(trainer.save_checkpoint, source, FP32, random_sequences(4, EVEN), run, layout)
    assert find_changed(indexers, read_weights(run / "mtp")) == [] and find_damage(run) == ""
    convert(run, tmp_path / "export", {})
    exported, config = read_weights(tmp_path / "export"), read_config(tmp_path / "export")
    assert find_changed(indexers, exported) == [] and "model.norm.weight" in find_changed(read_weights(source), exported)
    assert config["model_type"] == family and config["index_topk"] == 384
    HFCheckpoint(tmp_path / "export", config).check(ModelGeometry.from_hf_config(config))
    name, unfit, loaded = transformers_process.call(load_by_transformers, tmp_path / "export")[0]
    assert name == CLASSES[family] and unfit == {} and find_changed(indexers, loaded) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_indexers_stay_or_are_made_and_undone_with_all_others(family, model_folder, tmp_path):
    """Also those of a layer for multi-token prediction."""
    shutil.copytree(model_folder(family, num_hidden_layers=2), tmp_path / "model")
    with_random_blocks(tmp_path / "model", "pow2", seed=3)
    add_mtp_layer(tmp_path / "model", "pow2")
    blocks = take_indexers(read_weights(tmp_path / "model"))
    quantized = {name.removesuffix("_scale_inv") for name in blocks if name.endswith("_scale_inv")}
    assert {name.rpartition(".indexer.")[2] for name in quantized} == {"wq_b.weight", "wk.weight"} and len(quantized) == 2 * 3
    convert(tmp_path / "model", tmp_path / "bf16", {"mode": "bf16"})
    convert(tmp_path / "bf16", tmp_path / "fp8", {"mode": "fp8_unified"})
    values, again = read_weights(tmp_path / "bf16"), take_indexers(read_weights(tmp_path / "fp8"))
    rest = {name: tensor for name, tensor in blocks.items() if name.removesuffix("_scale_inv") not in quantized}
    assert find_changed(rest, values) == find_changed(rest, again) == [] and len(rest) == 3 * 3 and again.keys() == blocks.keys()
    for name in quantized:
        codes, scales = slow_fp8.quantize_matrix(values[name].float().numpy(), "pow2")
        assert np.array_equal(again[name].view(torch.uint8).numpy(), codes) and np.array_equal(again[f"{name}_scale_inv"].numpy(), scales)


def test_checkpoints_name_what_is_not_trained_and_refuse_a_missing_or_wrong_indexer(model_folder, tmp_path):
    folder = model_folder("glm_moe_dsa", num_hidden_layers=2)
    config, tensors = read_config(folder), read_weights(folder)
    model = ModelGeometry.from_hf_config(config)
    (line,) = HFCheckpoint(folder, config).describe_unread(model)
    assert "indexer.k_norm.bias and 1 of other numbers" in line and "its indexers are neither trained nor synced to engines" in line
    name = "model.layers.1.self_attn.indexer.wk.weight"
    for change, words in (
        ({name: None}, f"tensor {name} is missing"),
        ({name: torch.zeros(64, 256)}, f"tensor {name} has shape \\[64, 256\\], config.json says \\[128, 256\\]"),
        ({f"{name}_scale_inv": torch.zeros(1, 2)}, f"tensor {name}_scale_inv does not belong to the glm_moe_dsa model"),
        ({"model.layers.1.self_attn.indexer.wq_a.weight": torch.zeros(1)}, "indexer.wq_a.weight does not belong to the glm_moe_dsa model"),
    ):
        save_file({key: value for key, value in (tensors | change).items() if value is not None}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=words):
            HFCheckpoint(tmp_path, config).check(model)


def test_an_engine_loads_a_checkpoint_directly_as_a_deepseek_v3(model_folder, tmp_path):
    folder = model_folder("deepseek_v32", num_hidden_layers=2)
    checkpoint = EvalCheckpoint(folder, read_config(folder), None, None, loads_directly=True)
    prepared = checkpoint.prepare(None, tmp_path / "served")
    assert read_config(prepared)["model_type"] == "deepseek_v3" and (prepared / "model.safetensors").is_symlink()
