"""Writing checkpoint folders: complete or absent, and readable by the standard libraries; an unusable tokenizer is refused."""

import json
import os
import stat
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.hf.files import INDEX, read_config
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import atomic_folder, write_checkpoint, write_file


@pytest.mark.parametrize(("umask", "of_folders", "of_files"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)])
def test_a_finished_folder_appears_at_once_with_the_modes_of_the_umask(tmp_path, request, umask, of_folders, of_files):
    target = tmp_path / "a" / "model"
    request.addfinalizer(partial(os.umask, os.umask(umask)))
    with atomic_folder(target) as folder:
        (folder / "file").write_text("x")
        (folder / "sub").mkdir()
        write_file(folder / "sub" / "weights", {"a": torch.zeros(1)})
        assert not target.exists() and folder.parent == target.parent
    assert (target / "file").read_text() == "x"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (target, *target.rglob("*"))}
    assert modes == {"model": of_folders, "file": of_files, "sub": of_folders, "weights": of_files}
    assert os.listdir(target.parent) == ["model"]


def test_a_failure_leaves_nothing_and_an_existing_folder_is_unchanged(tmp_path):
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


def test_a_checkpoint_is_read_back_bit_for_bit_with_tokenizer_files(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    make_byte_tokenizer(source)
    kept = {"tokenizer.json", "tokenizer_config.json", "added_tokens.json", "spiece.model", "tokenization_x.py", "tokenizer/vocab.json"}
    kept |= {"additional_chat_templates/tool_use.jinja", "qwen.tiktoken", "NOTICE"}
    for name in ("config.json", "hf_quant_config.json", "other.bin", ".hidden", "checkpoint-5/config.json", "checkpoint-5/x.json", *kept):
        (source / name).parent.mkdir(exist_ok=True)
        if not (source / name).exists():
            (source / name).write_text("{}")
    with open(source / "large.json", "wb") as file:
        file.truncate(1 << 32)  # sparse
    os.mkfifo(source / "pipe")
    (source / "loop").symlink_to(".")
    (source / "sub").mkdir()
    (source / "sub" / "additional_chat_templates").symlink_to("../..")
    scrambled = torch.randn(6, 4).t()  # not contiguous
    tensors = {"a": scrambled, "b": torch.randn(3).bfloat16(), "c": torch.randn(4, 4).to(torch.float8_e4m3fn)}
    write_checkpoint(target, {"model_type": "qwen3"}, tensors, source)
    written = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert written == {"config.json", "model.safetensors", *kept}
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in kept)
    loaded = load_file(target / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert read_config(target) == {"model_type": "qwen3"}


@pytest.mark.parametrize(
    "content, rule",
    [(None, "no config.json; give"), ("{", "is not valid JSON"), ("[1]", "must be a JSON object"), (b"\xff\xfe", "is not valid JSON")],
)
def test_a_bad_config_json_is_refused_in_one_line(tmp_path, content, rule):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rule) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_many_tensors_are_written_as_several_files(tmp_path):
    tensors = {f"layer.{number}": torch.full((5,), float(number)) for number in range(5)}
    write_checkpoint(tmp_path, {}, tensors, None, file_bytes=40)  # two tensors of 20 bytes
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {name: f"model-0000{1 + number // 2}-of-00003.safetensors" for number, name in enumerate(tensors)}
    assert index["metadata"] == {"total_size": 100} and len(os.listdir(tmp_path)) == 2 + 3
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_an_unusable_tokenizer_is_refused(tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            load_tokenizer(folder)
        assert str(caught.value).startswith("model.path = ") and "\n" not in str(caught.value)
        return str(caught.value)

    assert "must be the folder" in refusal(tmp_path / "absent")
    for content, reason in ((None, "it has no tokenizer.json"), ("{", ""), ("[]", ""), ("{}", "it lacks 'added_tokens'")):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        assert f"no usable tokenizer ({reason}" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')  # transformers makes an empty tokenizer from it
    assert "no usable tokenizer" in refusal(tmp_path)
    make_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no end token" in refusal(tmp_path)
