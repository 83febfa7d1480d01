"""The chat template for DeepSeek-V3.2 writes what the published encoder writes, a copy of which SGLang has."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from support.chat_templates import make_chat_tokenizer

from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.messages import ConversationMessage, ToolCall

TEMPLATE = Path(__file__).parents[3] / "examples/chat_templates/deepseek_v32.jinja"
BOS, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Wetter, 'é'\n", "parameters": {"type": "object", "properties": {}}},
    },
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Rome <b>", "days": 3, "units": ["C", None]}}},
    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {}}},
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi.", "reasoning_content": "greet"},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": CALLS},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    {"role": "tool", "content": "0", "tool_call_id": "c2"},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "say"},
    {"role": "user", "content": "And Oslo?"},
]


@pytest.fixture(scope="module")
def encoder():
    spec = importlib.util.find_spec("sglang")
    path = Path(spec.submodule_search_locations[0]) / "srt/entrypoints/openai/encoding_dsv32.py"
    module = importlib.util.module_from_spec(found := importlib.util.spec_from_file_location("encoding_dsv32", path))
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_chat_tokenizer(tmp_path_factory.mktemp("v32"), TEMPLATE.read_text(), (END,), BOS)


@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", [2, 4, 7, 9])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_template_writes_what_the_published_encoder_writes(encoder, tokenizer, mode, first, count, tools):
    chat = CHAT[first:count]
    written = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True, thinking=mode == "thinking")
    messages = [{"role": "system", "content": ""}, *chat] if first else [*chat]
    messages[0] = messages[0] | ({"tools": tools} if tools else {})
    assert written == encoder.encode_messages(messages, thinking_mode=mode)


def test_agents_continue_after_tool_calls(tokenizer):
    format = ChatFormat(tokenizer, DataConfig(chat_template_kwargs={"thinking": True}))
    format.check(tools=True)
    calls = [ToolCall(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in CALLS]
    results = [ConversationMessage("tool", text, tool_call_id=number) for text, number in (("sunny", "c1"), ("0", "c2"))]
    answer = np.array([5, tokenizer.eos_token_id], np.int32)
    rest = format.decode_all(format.encode_rest(results, json.dumps(TOOLS), answer, calls))
    assert rest == "\n\n<function_results>\n<result>sunny</result>\n<result>0</result>\n</function_results>\n\n<think>"
