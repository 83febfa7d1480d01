"""The byte-level tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.arithmetic.byte_tokenizer import SPECIAL_TOKENS, make_byte_tokenizer
from megatron_rl.hf.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model") / "new"
    make_byte_tokenizer(folder)
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
