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


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="model.path = .*must be the folder"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unusable_tokenizer_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="model.path = .*no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_end_token_is_refused(tmp_path):
    make_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="model.path = .*no end token"):
        load_tokenizer(tmp_path)
