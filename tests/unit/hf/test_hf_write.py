"""Checkpoint folders: whole or absent, and readable by their own libraries."""

from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config import ArchitectureConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.create import make_hf_config, make_random_tensors
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import atomic_folder, write_checkpoint


def test_a_finished_folder_appears_at_once_and_readable(tmp_path):
    target = tmp_path / "a" / "model"
    with atomic_folder(target) as folder:
        (folder / "file").write_text("x")
        assert not target.exists() and folder.parent == target.parent
    assert (target / "file").read_text() == "x"
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert os.listdir(target.parent) == ["model"]


def test_a_failure_leaves_nothing_and_a_folder_that_is_there_stays_as_it_was(tmp_path):
    def write_half(error: type[BaseException]) -> None:
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "half").write_text("x")
            raise error

    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            write_half(error)
        assert os.listdir(tmp_path) == []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("precious")
    with pytest.raises(OSError), atomic_folder(tmp_path / "model") as folder:
        (folder / "new").write_text("x")
    assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == ["old"]


def test_a_checkpoint_comes_back_bit_by_bit_with_the_tokenizers_files(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model-00001.safetensors", "notes.txt"):
        (source / name).write_text(name)
    scrambled = torch.randn(6, 4).t()  # not contiguous
    tensors = {"a": scrambled, "b": torch.randn(3).bfloat16(), "c": torch.randn(4, 4).to(torch.float8_e4m3fn)}
    write_checkpoint(target, {"model_type": "qwen3"}, tensors, source)
    assert {file.name for file in target.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip
    loaded = load_file(target / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert read_config(target) == {"model_type": "qwen3"}


@pytest.mark.parametrize(
    "content, rule",
    [(None, "holds no config.json; give"), ("{", "is no valid JSON"), ("[1]", "must be a JSON object"), (b"\xff\xfe", "is no valid JSON")],
)
def test_a_bad_config_json_is_the_users_error_in_one_line(tmp_path, content, rule):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rule) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_transformers_reads_a_new_config(tmp_path):
    from transformers import AutoConfig

    def read(architecture: ArchitectureConfig, dtype: str):
        (tmp_path / "config.json").write_text(json.dumps(make_hf_config(architecture, 7, dtype)))
        return AutoConfig.from_pretrained(tmp_path)

    dense = read(ArchitectureConfig(hidden_size=384, tie_word_embeddings=True, rope_theta=5000.0), "bf16")
    assert (type(dense).__name__, dense.hidden_size, dense.tie_word_embeddings, dense.eos_token_id) == ("Qwen3Config", 384, True, 7)
    assert dense.dtype == torch.bfloat16
    widths = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
    moe = read(ArchitectureConfig(**widths), "fp32")
    assert (type(moe).__name__, moe.norm_topk_prob, moe.decoder_sparse_step, moe.mlp_only_layers) == ("Qwen3MoeConfig", True, 1, [])
    assert {name: getattr(moe, name) for name in widths} == widths


def test_random_weights_repeat_with_the_seed_and_norms_are_one():
    shapes = {"w": (300, 400), "norm": (400,)}
    first, again, other = (make_random_tensors({"initializer_range": 0.02}, shapes, seed) for seed in (1, 1, 2))
    assert torch.equal(first["w"], again["w"]) and not torch.equal(first["w"], other["w"])
    assert (first["norm"] == 1).all() and all(tensor.dtype == torch.float32 for tensor in first.values())
    assert first["w"].std().item() == pytest.approx(0.02, rel=0.02) and abs(first["w"].mean().item()) < 1e-3
