"""A conversation of three turns with a tool, in the templates of today's models: what follows a response is what the template writes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.chat_templates import TEMPLATES, make_chat_tokenizer

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.messages import ConversationMessage, ToolCall

PUBLISHED = Path(__file__).parents[5] / "shared/data/chat_templates"
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "look_up", "description": "Weather", "parameters": {"type": "object", "properties": {}}}}]
)
CALL = ToolCall("call_1abc", "look_up", '{"city": "Rome"}')
FIRST = [ConversationMessage("system", "Be brief."), ConversationMessage("user", "Weather in Rome?")]
CALLED, RESULT = (
    ConversationMessage("assistant", "", (CALL,)),
    ConversationMessage("tool", "sunny", tool_call_id="call_1abc", name="look_up"),
)
SAID, ASKED = ConversationMessage("assistant", "It is sunny."), ConversationMessage("user", "And Oslo?")
MODELS = {  # file of ../shared/data/chat_templates: the reduced template with the same end tokens
    "Qwen-Qwen3-0.6B": "chatml",
    "trl-qwen3_instruct_2507": "chatml",
    "Qwen3-Coder": "chatml",
    "trl-qwen3_5_think": "chatml",
    "trl-qwen3_6": "chatml",
    "trl-qwen3_8": "chatml",
    "trl-glm4moe": "roles",
    "GLM-4.6": "roles",
    "GLM-4.7-Flash": "roles",
    "openai-gpt-oss-120b": "channels",
    "deepseek-ai-DeepSeek-V3.1": "bars",
    "trl-deepseekv3": "bars",
    "moonshotai-Kimi-K2": "chatml",
    "moonshotai-Kimi-K2-Thinking": "chatml",
    "Mistral-Small-3.2-24B-Instruct-2506": "instructions",
    "MiniMax-M2": "brackets",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "chatml",
    "trl-nemotron_3_super": "chatml",
    "meta-llama-Llama-3.1-8B-Instruct": "headers",
    "meta-llama-Llama-3.2-3B-Instruct": "headers",
    "meta-llama-Llama-3.3-70B-Instruct": "headers",
}
WITHOUT_TOOLS = ("deepseek-ai-DeepSeek-V3.1", "trl-deepseekv3")  # templates that write calls and results, but no tools
KEYS = {  # keys of a template and a text that it writes with them
    "trl-qwen3_8": ({"reasoning_effort": "low"}, ""),
    "Qwen-Qwen3-0.6B": ({"enable_thinking": False}, "<think>\n\n</think>"),
    "openai-gpt-oss-120b": ({"reasoning_effort": "high"}, "Reasoning: high"),
    "deepseek-ai-DeepSeek-V3.1": ({"thinking": True}, "<｜Assistant｜><think>"),
    "GLM-4.7-Flash": ({"enable_thinking": False}, "<|assistant|></think>"),
}


def read_template(name: str) -> tuple[str, tuple[str, ...]]:
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not (path := PUBLISHED / f"{name}.jinja").exists():
        pytest.skip("needs the data sets in ../shared/data")
    return path.read_text(), TEMPLATES[MODELS[name]][1]


def make_format(folder, name, **data):
    template, ends = read_template(name)
    tokenizer = make_chat_tokenizer(folder / "model", template, ends, "<|bos|>")
    return ChatFormat(tokenizer, DataConfig(**data)), tokenizer, ends


@pytest.mark.parametrize("name", [*TEMPLATES, *MODELS])
def test_what_follows_a_response_is_what_the_template_writes(name, tmp_path, caplog):
    format, tokenizer, ends = make_format(tmp_path, name)
    format.check(tools=True)
    start = format.decode_all(format.encode_start(FIRST, TOOLS))
    assert "Weather in Rome?" in start and ("look_up" in start) == (name not in WITHOUT_TOOLS)
    assert ("leaves out the tool 'look_up'" in caplog.text) == (name in WITHOUT_TOOLS)
    whole_result = format._render([*FIRST, CALLED, RESULT], TOOLS)
    whole_asked = format._render([*FIRST, CALLED, RESULT, SAID, ASKED], TOOLS)
    unended = np.array(tokenizer.encode("said", add_special_tokens=False), np.int32)
    for end in ends:  # whatever end token the engine has stopped at
        answer = np.append(unended, np.int32(tokenizer.convert_tokens_to_ids(end)))
        assert [len(part) for part in format.split_end(answer)] == [len(unended), 1]
        for messages, calls, whole in (([RESULT], (CALL,), whole_result), ([ASKED], (), whole_asked)):
            rest = format.decode_all(format.encode_rest(messages, TOOLS, answer, calls))
            assert whole.endswith(rest) and messages[0].content in rest
            assert not rest.startswith(("<|eot_id|>", "<|im_end|>", "<|end|>", "[e~[", end)), "a second end"
    for messages, calls, whole in (([RESULT], (CALL,), whole_result), ([ASKED], (), whole_asked)):  # cut at a limit
        rest = format.decode_all(format.encode_rest(messages, TOOLS, unended, calls))
        assert whole.endswith(rest)
        assert rest.startswith(ends) or rest.startswith(("<|end|>", "<｜")), "the template ends the turn"


def test_a_special_token_that_ends_no_turn_stays_in_the_response(tmp_path):
    format, tokenizer, _ = make_format(tmp_path, "channels")
    answer = np.array([5, tokenizer.convert_tokens_to_ids("<|channel|>")], np.int32)
    assert [len(part) for part in format.split_end(answer)] == [2, 0]


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_published_templates(name, tmp_path):
    keys, wanted = KEYS[name]
    plain, _, _ = make_format(tmp_path / "plain", name)
    format, _, _ = make_format(tmp_path, name, chat_template_kwargs=keys)
    format.check(tools=True)
    text = format.decode_all(format.encode_start(FIRST, "[]"))
    assert wanted in text and text != plain.decode_all(plain.encode_start(FIRST, "[]"))
    with pytest.raises(UserError, match=re.escape("does not use this key; it uses")):
        make_format(tmp_path / "other", name, chat_template_kwargs={"reasoning_effrt": "low"})[0].check(tools=True)
