"""The byte-level tokenizer, and the one line a user gets when a checkpoint's tokenizer is unusable."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.byte_tokenizer import SPECIAL_TOKENS, load_tokenizer, make_byte_tokenizer
from megatron_rl.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "new"
    make_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return load_tokenizer(folder)


def test_it_has_a_token_per_byte_and_three_special_ones(tokenizer):
    assert len(tokenizer) == 259
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258]
    assert tokenizer.encode("#62<|endoftext|>")[-1] == 256


@given(st.text().filter(lambda text: "<|" not in text))
def test_any_text_survives_and_costs_one_token_per_byte(tokenizer, text):
    ids_T = tokenizer.encode(text)
    assert len(ids_T) == len(text.encode())
    assert tokenizer.decode(ids_T) == text


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
    make_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no end token" in refusal(tmp_path)
