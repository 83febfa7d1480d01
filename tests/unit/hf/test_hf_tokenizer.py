"""An unusable tokenizer is refused in one line."""

import json
from pathlib import Path

import pytest

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.hf.tokenizer import load_tokenizer


def test_an_unusable_tokenizer_is_refused(tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            load_tokenizer(folder)
        assert str(caught.value).startswith("model.path = ") and "\n" not in str(caught.value)
        return str(caught.value)

    assert "must be the folder" in refusal(tmp_path / "absent")
    for content in (None, "{", "[]"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        assert "no usable tokenizer" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')  # transformers makes an empty tokenizer from it
    assert "no usable tokenizer" in refusal(tmp_path)
    make_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no end token" in refusal(tmp_path)
