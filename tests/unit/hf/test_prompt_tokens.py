"""Special tokens of prompts without a chat template, for tokenizers of base models, and the keys and the date of chat templates."""

import datetime
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig
from megatron_rl.data import check_data, load_held_out, load_problems
from megatron_rl.errors import UserError
from megatron_rl.hf.chat_template import ChatTemplate
from megatron_rl.hf.prompt_tokens import encode_continuation, encode_prompt
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.rewards.thinking import decode_completion
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.types import Generation, SamplingParams

BOS, EOS = "<|im_start|>", "<|endoftext|>"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
THINKS = "{{ bos_token }}" + PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %} " + PLAIN


@pytest.fixture
def make_model(tmp_path):
    """Return a folder with a tokenizer whose post-processor adds tokens as `pattern` says, such as "BOS $A"."""

    def make(pattern: str = "$A", template: str | None = None):
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        make_byte_tokenizer(folder)
        tokenizer = load_tokenizer(folder)
        special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
        single = pattern.replace("BOS", BOS).replace("EOS", EOS)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
        tokenizer.bos_token = BOS
        tokenizer.chat_template = template
        shutil.rmtree(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def make_config(folder, rows: str, **data: object) -> Config:
    data = {"train": rows, "eval": rows, "format": "gsm8k", "overlap": "allow", **data}
    return Config.model_validate({"model": {"path": str(folder)}, "data": data}, strict=False)


class Recorder:
    """An engine that records prompts."""

    def generate(self, prompts_B, samplings, abort=None):
        self.prompts = [prompt.tolist() for prompt in prompts_B]
        return [Generation(np.array([97]), np.array([-1.0]), "stop", 0) for _ in prompts_B]


@pytest.fixture
def rows(tmp_path):
    def write(question: str = "1+1?") -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"question": question, "answer": "#### 2"}))
        return str(path)

    return write


@pytest.mark.parametrize("pattern, adds", [("BOS $A", True), ("$A", False)])
def test_a_base_model_gets_the_prompt_of_its_tokenizer(make_model, rows, pattern, adds):
    folder = make_model(pattern)
    tokenizer, config = load_tokenizer(folder), make_config(folder, rows())
    stream, held_out = load_problems(config, tokenizer)
    for problem in [*stream.next_batch(1), *held_out, *load_held_out(config, tokenizer)]:
        engine = Recorder()
        sampler = MultiTurnSampler(engine, tokenizer, data=config.data)
        (completion,) = sampler.sample([problem], [SamplingParams(1.0, 9)], 0)
        assert engine.prompts == [tokenizer(problem.prompt)["input_ids"]] == [completion.prompt_ids_T.tolist()]
        assert engine.prompts[0].count(tokenizer.bos_token_id) == adds


def test_special_tokens_count_for_the_length(make_model, rows):
    folder = make_model("BOS $A")
    with pytest.raises(UserError, match="all 1 prompts of data.eval"):
        load_problems(make_config(folder, rows(), max_prompt_tokens=4), load_tokenizer(folder))
    load_problems(make_config(folder, rows(), max_prompt_tokens=5), load_tokenizer(folder))


def test_a_chat_template_writes_all_special_tokens(make_model, rows):
    folder = make_model("BOS $A", THINKS)
    tokenizer, config = load_tokenizer(folder), make_config(folder, rows(), chat=True)
    (problem,) = load_problems(config, tokenizer)[0].next_batch(1)
    assert encode_prompt(tokenizer, problem.prompt, chat=True).count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    "pattern, template, question, line",
    [
        (
            "BOS $A",
            None,
            f"{BOS}1+1?",
            "data.chat = False: a prompt begins with two BOS tokens '<|im_start|>', because the prompt's text begins",
        ),
        (
            "$A",
            "{{ bos_token }}" + THINKS,
            "1+1?",
            "data.chat = True: a prompt begins with two BOS tokens '<|im_start|>', because the chat tem",
        ),
        ("BOS $A EOS", None, "1+1?", "model.path: the tokenizer of "),
    ],
)
def test_doubled_and_final_special_tokens_are_refused(make_model, rows, pattern, template, question, line):
    folder = make_model(pattern, template)
    data = make_config(folder, rows(question), chat=template is not None, special_text="token").data
    with pytest.raises(UserError) as caught:
        check_data(data, folder)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_keys_reach_the_chat_template(make_model, rows):
    folder = make_model("$A", THINKS)
    config = make_config(folder, rows(), chat=True, chat_template_kwargs={"enable_thinking": False})
    stream, held_out = load_problems(config, load_tokenizer(folder))
    assert [problem.prompt for problem in (*stream.next_batch(1), *held_out)] == [f"{BOS}1+1?<think></think>"] * 2


@pytest.mark.parametrize(
    "template, key, line",
    [
        (
            THINKS,
            "thinking",
            "data.chat_template_kwargs = 'thinking': the chat template of .* does not use this key; it uses enable_thinking; corr",
        ),
        (PLAIN, "enable_thinking", "does not use this key; it uses none; correct or remove it"),
        (THINKS, "messages", "does not use this key"),
        (THINKS, "bos_token", "does not use this key"),
        (DATED, "strftime_now", "does not use this key"),
        ("{{ [1, 2] | random }}" + PLAIN, "", "data.chat: the chat template of .* draws random text, so a resumed run"),
    ],
)
def test_keys_that_a_template_does_not_use_are_refused(make_model, rows, template, key, line):
    folder = make_model("$A", template)
    config = make_config(folder, rows(), chat=True, chat_template_kwargs={key: False} if key else {})
    with pytest.raises(UserError, match=line):
        check_data(config.data, folder)
    with pytest.raises(UserError, match=line):
        ChatTemplate(load_tokenizer(folder), config.data).check()


def test_the_date_is_a_field_and_not_the_clock(make_model, rows, monkeypatch):
    folder = make_model("$A", DATED)
    tokenizer, config = load_tokenizer(folder), make_config(folder, rows(), chat=True)
    stream, _ = load_problems(config, tokenizer)
    state = stream.state_dict()
    assert stream.next_batch(1)[0].prompt == "01 Jan 2026 1+1?"

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 5, 6)

    monkeypatch.setattr("datetime.datetime", Tomorrow)
    resumed, _ = load_problems(config, tokenizer)
    resumed.load_state_dict(state)
    assert resumed.next_batch(1)[0].prompt == "01 Jan 2026 1+1?"
    other = make_config(folder, rows(), chat=True, date="2025-02-03")
    assert DataConfig.model_validate_json(other.data.model_dump_json()).date == datetime.date(2025, 2, 3)
    changed, _ = load_problems(other, tokenizer)
    assert changed.next_batch(1)[0].prompt == "03 Feb 2025 1+1?"
    with pytest.raises(UserError, match="other problems or in another order"):
        changed.load_state_dict(state)


def test_another_template_or_row_is_other_data(make_model, rows):
    folder = make_model("$A", THINKS)
    tokenizer = load_tokenizer(folder)
    state = load_problems(make_config(folder, rows(), chat=True), tokenizer)[0].state_dict()
    for changes in ({"prompt_template": "Q: {question}"}, {"chat_template_kwargs": {"enable_thinking": False}}, {"system_prompt": "S"}):
        with pytest.raises(UserError, match="other problems"):
            load_problems(make_config(folder, rows(), chat=True, **changes), tokenizer)[0].load_state_dict(state)
    with pytest.raises(UserError, match="other problems"):
        load_problems(make_config(folder, rows("1+1 ?"), chat=True), tokenizer)[0].load_state_dict(state)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_text_that_continues_has_no_blank_of_a_beginning(scheme):
    """Metaspace is what Llama 2, Mistral and Gemma write for SentencePiece. A byte tokenizer puts no blank."""
    letters = {letter: number for number, letter in enumerate("\u2581\n.a0bc[]<>2")}
    blank = Tokenizer(
        models.BPE(vocab=letters | {"\u2581a": 20, "\u2581\n": 21, "\n\n": 22}, merges=[("\u2581", "a"), ("\u2581", "\n"), ("\n", "\n")])
    )
    blank.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    blank.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=blank)
    ids = [letters[letter] for letter in "\u2581abc2\n"]
    assert encode_prompt(tokenizer, "abc", chat=True) == [20, *ids[2:4]] and encode_continuation(tokenizer, "abc") == ids[1:4]
    assert encode_continuation(tokenizer, "2") == [letters["2"]] and encode_continuation(tokenizer, " a") == [20]
    assert encode_continuation(tokenizer, "\n\nb") == [22, letters["b"]] and encode_continuation(tokenizer, "") == []
    assert decode_completion(tokenizer, [20, letters["b"]]) == " ab"
    tokenizer.add_special_tokens({"eos_token": "<e>"})
    end, *rest = tokenizer.encode("<e>abc", add_special_tokens=False)
    assert encode_continuation(tokenizer, "abc", end) == rest and (rest[0] == 20) == (scheme == "always")


def test_what_tokenizer_json_and_its_settings_say_is_what_is_loaded(make_model):
    """Beside a tokenizer.json, transformers 5 ignores `add_bos_token`, and Llama's class takes only the vocabulary from it."""
    folder = make_model("$A")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    tokenizer = load_tokenizer(folder)
    assert encode_prompt(tokenizer, "1", chat=False) == [tokenizer.bos_token_id, ord("1") - 33] == tokenizer("1")["input_ids"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizerFast"}))
    with pytest.raises(UserError, match="as LlamaTokenizer, which encodes other tokens than the file says; set .tokenizer_class"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_pointer_in_place_of_a_file_is_refused(make_model, name):
    folder = make_model()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match=f"model.path = '.*/{name}': is a pointer of Git LFS instead of the file; run `git lfs pull`"):
        load_tokenizer(folder)


def test_a_stop_text_may_be_a_special_token(make_model):
    tokenizer = load_tokenizer(make_model("$A"))
    ids = tokenizer.encode(f" a{BOS}", add_special_tokens=False)
    assert decode_completion(tokenizer, ids) == " a" and decode_completion(tokenizer, ids, (BOS,)) == f" a{BOS}"


def test_other_tokenizers_encode_what_continues_as_they_do(make_model):
    tokenizer = load_tokenizer(make_model("BOS $A"))
    for text in ("2", " 2", "\n\n", "<a>b", "a"):
        assert encode_continuation(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
