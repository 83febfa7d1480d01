"""Texts that the engine's server decodes are those of rank 0's tokenizer."""

import json

import numpy as np
import pytest

from examples.arithmetic.byte_tokenizer import SPECIAL_TOKENS, make_byte_tokenizer
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.rewards.thinking import decode_completion
from rollout_sglang.answers import pack_answers, read_answers
from rollout_sglang.texts import HEADER, ask_for_texts, make_text_reader

THOUGHT = ("◁think▷", SPECIAL_TOKENS[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_byte_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def answers(ids_B):
    about = {"finish_reason": {"type": "stop"}, "weight_version": "1", "cached_tokens": 0}
    return [{"meta_info": about | {"output_token_logprobs": [(-1.0, number, None) for number in ids]}} for ids in ids_B]


@pytest.mark.parametrize("markers", [None, THOUGHT])
def test_texts_keep_the_special_tokens_of_markers_and_of_their_own_stop_texts(folder, markers):
    tokenizer, stops = load_tokenizer(folder), [[], [SPECIAL_TOKENS[2]]]
    ids_B = [[*tokenizer.encode(f"a{SPECIAL_TOKENS[1]}b{SPECIAL_TOKENS[2]}é"), 200] for _ in stops]  # the last byte is no UTF-8
    read = make_text_reader(ask_for_texts(markers), [{"stop": stop} for stop in stops], folder)
    texts = [answer.text for answer in read_answers(pack_answers(answers(ids_B), read))]
    assert texts == [decode_completion(tokenizer, ids, markers, stop) for ids, stop in zip(ids_B, stops, strict=True)]
    assert [SPECIAL_TOKENS[1] in text for text in texts] == [markers is not None] * 2
    assert [SPECIAL_TOKENS[2] in text for text in texts] == [False, True]


def test_nobody_gets_texts_unasked_and_an_aborted_completion_has_one(folder):
    assert make_text_reader({}, [{}], folder) is None
    assert [answer.text for answer in read_answers(pack_answers(answers([[97]])))] == [None]
    read = make_text_reader(ask_for_texts(None), [{"stop": []}], folder)
    assert read_answers(pack_answers([{"meta_info": {"finish_reason": {"type": "abort"}}}], read))[0].text == ""
    assert ask_for_texts(THOUGHT)[HEADER].isascii() and read(0, np.array(load_tokenizer(folder).encode("a"))) == "a"
