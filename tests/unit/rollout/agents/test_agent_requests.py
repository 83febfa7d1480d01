"""Malformed requests, and what a policy may write, against the real endpoint with a real tokenizer and chat template: each is refused
with a reason or answered, and costs nobody else anything."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.agents import PROBLEM, config
from transformers import AutoTokenizer

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents import endpoint
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.engine import ParsedToolCalls
from megatron_rl.types import Completion, Generation, SamplingParams

CHAT, RESPONSES, TEXTS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP = "[" * 100_000


class Engine:
    """Answers every prompt with `reply`, and parses tool calls as SGLang's qwen25 does: what it cannot parse, or encode, is no call."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.reply, self.prompts = tokenizer, "yes", []

    def generate(self, prompts_B, samplings, abort=None):
        json.dumps(list(samplings[0].stop)).encode()
        self.prompts.append(prompts_B[0])
        ids_T = np.array([*self.tokenizer.encode(self.reply, add_special_tokens=False), self.tokenizer.eos_token_id], np.int32)
        return [Generation(ids_T, np.zeros(len(ids_T), np.float32), "stop", 5)]

    def parse_tool_calls(self, text, tools, parser):
        json.dumps({"text": text, "tools": json.loads(tools)}, ensure_ascii=False, allow_nan=False).encode()
        try:
            found = [json.loads(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)]
            calls = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in found]
        except (ValueError, RecursionError, TypeError, KeyError):
            return None
        return ParsedToolCalls(text.partition("<tool_call>")[0].strip(), calls)


class Client:
    """A raw HTTP client, and the episode that it belongs to."""

    def __init__(self, sampler: AgentSampler, engine: Engine) -> None:
        self.sampler, self.engine = sampler, engine
        sampling = SamplingParams(1.0, 300_000, seed=3)
        self.episode = AgentEpisode(PROBLEM, sampling, 5, 0, sampler._config, ChatFormat(engine.tokenizer, DataConfig()))
        self.key, self.port = sampler._endpoint.open(self.episode), urlsplit(sampler._endpoint.url).port

    def post(self, body: bytes, path: str = CHAT, key: str | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, body, {"Authorization": f"Bearer {key or self.key}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def ask(self, messages: list[dict], **options) -> dict:
        status, answer = self.post(json.dumps({"messages": messages, **options}).encode())
        assert status == 200, answer
        return answer["choices"][0]["message"]

    def finish(self) -> Completion:
        assert self.episode.failure is None
        return self.episode.finish("", None)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[AgentSampler, Engine]]:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    engine = Engine(tokenizer)
    with AgentSampler(config(tool_parser="qwen25", max_tokens=400_000, workers=4), engine, tokenizer, DataConfig()) as sampler:
        yield sampler, engine


@pytest.fixture
def client(served) -> Client:
    served[1].reply = "yes"
    served[1].prompts.clear()
    return Client(*served)


def chat(**changes) -> bytes:
    return json.dumps({"messages": [USER], **changes}).encode()


def message(**changes) -> bytes:
    return json.dumps({"messages": [{**USER, **changes}]}).encode()


def text(**changes) -> bytes:
    return json.dumps({"prompt": "x", **changes}).encode()


def call(**function) -> bytes:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}]
    return json.dumps({"messages": [USER, {"role": "assistant", "tool_calls": calls}, USER]}).encode()


def raw(value: str, name: str = "content") -> bytes:
    return f'{{"messages": [{{"role": "user", "content": "x", "{name}": {value}}}]}}'.encode()


def tool(**function) -> bytes:
    return chat(tools=[{"type": "function", "function": {"name": "f", **function}}])


def respond(value: object, **changes) -> bytes:
    return json.dumps({"input": value, **changes}).encode()


REFUSED = {
    "empty": b"", "blank": b" ", "text": b"hello", "half": b'{"messages": [', "two values": chat() + b"1",
    "utf-16": chat().decode().encode("utf-16"), "utf-8 mark": b"\xef\xbb\xbf" + chat(),
    "latin": b'{"messages": [{"role": "user", "content": "\xe9"}]}', "control": raw('"\x01"'),
    "surrogate bytes": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "zeros": b"\0" * 100,
    "trailing comma": b'{"messages": [],}', "single quotes": b"{'messages': []}", "gzip": b"\x1f\x8b\x08\0\0\0\0\0",
    "form": b"messages=x", "brackets": DEEP.encode(), "objects": b'{"a":' * 100_000, "closed brackets": raw(DEEP + "]" * 100_000),
    "201 levels": raw("[" * 201 + "]" * 201), "null": b"null", "number": b"5", "string": b'"x"', "list": b"[]", "true": b"true",
    "no messages": b"{}", "surrogate": raw('"\\ud800"'), "low surrogate": raw('"\\udc00"'), "swapped pair": raw('"\\udc00\\ud800"'),
    "surrogate key": b'{"\\ud800": 1}', "surrogate role": raw('"\\ud800"', "role"), "surrogate name": raw('"\\udfff"', "name"),
    "surrogate stop": b'{"messages": [], "stop": "\\ud800"}', "nan": raw("NaN"), "nan option": b'{"messages": [], "temperature": NaN}',
    "infinity": raw("-Infinity"), "long number": raw("1" * 5000), "hexadecimal": raw("0x1"), "plus": raw("+1"),
    "messages null": chat(messages=None), "messages text": chat(messages="x"), "messages object": chat(messages={}),
    "messages 5": chat(messages=5), "messages empty": chat(messages=[]), "messages nested": chat(messages=[[USER]]),
    "message null": chat(messages=[None]), "message text": chat(messages=["x"]),
    "last is the policy's": chat(messages=[USER, {"role": "assistant", "content": "y"}]), "too many": chat(messages=[USER] * 10_001),
    "role list": message(role=[]), "role object": message(role={}), "role null": message(role=None), "role 5": message(role=5),
    "role true": message(role=True), "role unknown": message(role="critic"), "role missing": chat(messages=[{"content": "x"}]),
    "role blank": message(role=""), "role with a zero": message(role="user\0"), "content 5": message(content=5),
    "content true": message(content=True), "content list of 5": message(content=[5]),
    "content nested": message(content=[[{"text": "x"}]]), "content of null": message(content=[None]),
    "text list": message(content=[{"type": "text", "text": []}]), "text missing": message(content=[{"type": "text"}]),
    "image": message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "name 5": message(name=5),
    "name list": message(name=["x"]), "name long": message(name="x" * 2000), "reply id 5": message(role="tool", tool_call_id=5),
    "calls 5": message(tool_calls=5), "calls text": message(tool_calls="f"), "calls object": message(tool_calls={"id": "c"}),
    "call null": message(tool_calls=[None]), "call without function": message(tool_calls=[{"id": "c"}]),
    "function text": message(tool_calls=[{"id": "c", "function": "f"}]),
    "call without id": message(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "arguments object": call(arguments={}),
    "arguments null": call(arguments=None), "arguments 5": call(arguments=5), "called name null": call(name=None),
    "called name list": call(name=[]), "many calls": message(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": ""}}] * 2000),
    "tools 5": chat(tools=5), "tools text": chat(tools="f"), "tools true": chat(tools=True), "tools object": chat(tools=TOOL),
    "tool 5": chat(tools=[5]), "tool null": chat(tools=[None]), "tool list": chat(tools=[[]]),
    "tool type": chat(tools=[{**TOOL, "type": []}]), "tool search": chat(tools=[{"type": "web_search"}]),
    "tool without function": chat(tools=[{"type": "function"}]), "tool function 5": chat(tools=[{"type": "function", "function": 5}]),
    "tool without name": tool(name=None), "tool name 5": tool(name=5), "tool name empty": tool(name=""),
    "tool name long": tool(name="f" * 2000), "tool description 5": tool(description=5), "tool parameters 5": tool(parameters=5),
    "tool parameters list": tool(parameters=[]), "tool infinity": tool(parameters={"a": 0}).replace(b"0}", b"1e999}"),
    "many tools": chat(tools=[TOOL] * 2000),
    "large number in a schema": tool(parameters={"maximum": 10**19}),
    "deep tool": tool(parameters={"a": 0}).replace(b"0}", b"[" * 300 + b"]" * 300 + b"}"),
    "stop 5": chat(stop=5), "stop false": chat(stop=False), "stop object": chat(stop={}), "stop of 5": chat(stop=[5]),
    "stop empty": chat(stop=""), "stop nested": chat(stop=[["x"]]), "stop long": chat(stop="x" * 300), "stops": chat(stop=["x"] * 17),
    "max_tokens 0": chat(max_tokens=0), "max_tokens -1": chat(max_tokens=-1), "max_tokens text": chat(max_tokens="5"),
    "max_tokens 1.5": chat(max_tokens=1.5), "max_tokens true": chat(max_tokens=True), "max_tokens list": chat(max_tokens=[1]),
    "max_completion_tokens": chat(max_completion_tokens=0), "stream 5": chat(stream=5), "stream text": chat(stream="yes"),
    "model 5": chat(model=5), "model list": chat(model=[]), "n 2": chat(n=2), "n list": chat(n=[1]),
    "unknown option": chat(guided_json={}), "deep option": b'{"messages": [], "text": ' + b"[" * 150 + b"]" * 150 + b"}",
    "tool_choice object": chat(tool_choice={"type": "function"}),
}  # fmt: skip
REFUSED_RESPONSES = {
    "no input": b"{}", "input 5": respond(5), "input null": respond(None), "input object": respond({}), "input of 5": respond([5]),
    "input empty": respond([]), "item null": respond([None]), "item type": respond([{"type": []}]),
    "item unknown": respond([{"type": "reasoning"}]), "item long type": respond([{"type": "x" * 1000}]),
    "call without id": respond([{"type": "function_call", "name": "f", "arguments": "{}"}]),
    "call arguments": respond([{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]),
    "output 5": respond([{"type": "function_call_output", "output": 5}]),
    "output id": respond([{"type": "function_call_output", "call_id": [], "output": "x"}]),
    "instructions list": respond("x", instructions=["x"]), "instructions 5": respond("x", instructions=5),
    "previous 5": respond("x", previous_response_id=5), "previous unknown": respond("x", previous_response_id="resp_7"),
    "previous text": respond("x", previous_response_id="x"), "previous negative": respond("x", previous_response_id="resp_-1"),
    "previous digits": respond("x", previous_response_id="resp_" + "9" * 5000), "truncation": respond("x", truncation="auto"),
    "include": respond("x", include=["message.output_text.logprobs"]), "max_tool_calls": respond("x", max_tool_calls=1),
    "tools 5": respond("x", tools=5), "flat tool": respond("x", tools=[TOOL]), "max_output_tokens": respond("x", max_output_tokens=0),
    "surrogate": b'{"input": "\\ud800"}', "list": b"[]",
}  # fmt: skip
REFUSED_TEXTS = {
    "no prompt": b"{}", "prompt null": text(prompt=None), "prompt 5": text(prompt=5), "prompts": text(prompt=["a", "b"]),
    "no prompts": text(prompt=[]), "prompt nested": text(prompt=[["a"]]), "ids": text(prompt=[1, 2]), "empty": text(prompt=""),
    "surrogate": b'{"prompt": "\\ud800"}', "max_tokens 0": text(max_tokens=0), "stop 5": text(stop=5),
    "tools": text(tools=[TOOL]), "echo": text(echo=True), "logprobs 0": text(logprobs=0),
    "stream_options 5": text(stream_options=5), "include_usage 5": text(stream_options={"include_usage": 5}),
    "list": b"[]", "brackets": DEEP.encode(),
}  # fmt: skip
ANSWERED = {
    "the last of doubled keys": b'{"messages": [{"role": "critic", "role": "user", "content": "x"}], "n": 2, "n": 1}',
    "emoji": raw('"\\ud83d\\ude00"'), "zero": raw('"\\u0000"'), "escape": raw('"\\u001b[2J"'),
    "markers": raw('"<|im_end|><|endoftext|>"'), "template": raw('"{{ 1/0 }}{% raise %}"'), "large limit": chat(max_tokens=10**300),
    "null options": chat(n=None, stop=None, tools=None, max_tokens=None), "200 levels": call(arguments="[" * 200 + "]" * 200),
    "nested arguments": call(arguments=DEEP), "closed arguments": call(arguments=DEEP + "]" * 100_000),
    "surrogate in arguments": call(arguments='{"a": "\\ud800"}'), "nan in arguments": call(arguments='{"a": NaN}'),
    "huge number in arguments": call(arguments='{"a": 1e999, "b": ' + "1" * 5000 + "}"),
    "control in arguments": call(arguments='{"a": "\x00\x1b"}'), "doubled keys in arguments": call(arguments='{"a": 1, "a": 2}'),
    "arguments that are none": call(arguments=""), "arguments text": call(arguments="not JSON"), "arguments 5": call(arguments="5"),
    "no name": call(name=""), "no messages content": message(content=None),
    "parts": message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    "null in a schema": tool(parameters={"default": None}),
    "unknown fields": message(refusal=None, audio=None, annotations=[]),
}  # fmt: skip


@pytest.mark.parametrize("path, body", [
    *(pytest.param(CHAT, body, id=name) for name, body in REFUSED.items()),
    *(pytest.param(RESPONSES, body, id=f"responses: {name}") for name, body in REFUSED_RESPONSES.items()),
    *(pytest.param(TEXTS, body, id=f"texts: {name}") for name, body in REFUSED_TEXTS.items()),
])  # fmt: skip
def test_a_malformed_request_is_refused_with_a_reason_and_costs_nothing_else(client, path, body):
    status, answer = client.post(body, path)
    assert 400 <= status < 500 and answer["error"]["type"] == "invalid_request_error" and 5 < len(answer["error"]["message"]) < 500
    assert client.ask([USER])["content"] == "yes" and client.finish().calls == 1


@pytest.mark.parametrize("body", ANSWERED.values(), ids=ANSWERED)
def test_an_unusual_request_is_answered(client, body):
    assert client.post(body)[0] == 200 and client.finish().calls == 1


CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize("said, is_call", {
    CALL % (DEEP + "]" * 100_000): False, CALL % DEEP: False, CALL % '{"a": "\\ud800"}': False, CALL % ("1" * 5000): False,
    CALL % '{"a": }': False, '<tool_call>\n{"name": "\\udfff", "arguments": {}}\n</tool_call>': False,
    "<tool_call>\n5\n</tool_call>": False, "<tool_call>" * 1000: False, CALL % '{"a": NaN}': True, CALL % '{"a": 1e999}': True,
    CALL % '{"a": 1, "a": 2}': True, CALL % '{"a": "\\u0000\\u001b"}': True, CALL % "[]": True, CALL % '"text"': True, CALL % "{}": True,
    CALL % ("[" * 150 + "]" * 150): True, "\0\x1b<|im_start|>system": False, "\ufffd\ufeff": False,
}.items(), ids=range(18))  # fmt: skip
def test_whatever_a_policy_writes_is_answered_and_its_history_continues_it(client, said, is_call):
    client.engine.reply = said
    answer = client.ask([USER], tools=[TOOL])
    assert bool(answer.get("tool_calls")) == is_call
    client.ask([USER, answer, {"role": "tool", "tool_call_id": "call00000", "content": "4"}], tools=[TOOL])
    first, second = client.engine.prompts
    assert second[: len(first)].tolist() == first.tolist() and len(second) > len(first) + len(said.encode()), "the sampled tokens are kept"
    completion = client.finish()
    assert len(completion.conversations) == 1 and not completion.foreign_histories


def retell(message: dict, arguments: str) -> dict:
    (known,) = message["tool_calls"]
    return {**message, "tool_calls": [{**known, "function": {**known["function"], "arguments": arguments}}]}


RETOLD = {
    "arguments without blanks": (lambda said: retell(said, '{"a":1,"b":[2.5,"é"],"c":2}'), True),
    "arguments in another order": (lambda said: retell(said, '{"c": 2, "b": [2.5, "\\u00e9"], "a": 1.0}'), True),
    "arguments in lines": (lambda said: retell(said, '{\n  "a": 1,\n  "b": [\n 2.5, "é"],\n  "c": 2.0\n}\n'), True),
    "without blanks": (lambda said: {**said, "content": said["content"].strip()}, True),
    "with blanks": (lambda said: {**said, "content": f" {said['content']}\n"}, True),
    "with a name": (lambda said: {**said, "name": "solver"}, True),
    "with other ids": (lambda said: {**said, "tool_calls": [{**said["tool_calls"][0], "id": "toolu_1"}]}, True),
    "in parts": (lambda said: {**said, "content": [{"type": "text", "text": said["content"]}]}, True),
    "with nulls": (lambda said: {**said, "refusal": None, "function_call": None, "audio": None}, True),
    "another value": (lambda said: retell(said, '{"a": 1, "b": [2.5, "e"], "c": 2}'), False),
    "a value of another type": (lambda said: retell(said, '{"a": true, "b": [2.5, "é"], "c": 2}'), False),
    "another text": (lambda said: {**said, "content": "Sure!"}, False),
    "without its text": (lambda said: {**said, "content": None}, False),
    "without its call": (lambda said: {**said, "tool_calls": None}, False),
}


@pytest.mark.parametrize("change, same", RETOLD.values(), ids=RETOLD)
def test_a_history_that_says_the_same_continues_the_conversation(client, change, same, caplog):
    client.sampler._warned.clear()
    client.engine.reply = "Well: \n" + CALL % '{"a": 1, "b": [2.5, "é"], "c": 2}'
    said = client.ask([USER], tools=[TOOL])
    client.engine.reply = "four "
    user = {"role": "user", "content": "and?"}
    last = client.ask([USER, change(said), user], tools=[TOOL])
    client.ask([{**USER, "name": "me"}, change(said), user, {**last, "content": "four"}, {"role": "user", "content": "so?"}], tools=[TOOL])
    completion = client.finish()
    assert (len(completion.conversations), completion.foreign_histories) == ((1, 0) if same else (2, 1))
    assert len(completion.history_notes) == (not same) == len([text for text in caplog.messages if "so another sample begins" in text])
    assert same or completion.history_notes[0].startswith("message 1 (assistant): the t")


def test_blanks_that_the_template_writes_and_other_tools_begin_another_conversation(client):
    said = client.ask([USER])
    client.ask([{**USER, "content": "x "}, said, USER])
    client.ask([USER, said, USER], tools=[TOOL])
    client.ask([{"role": "system", "content": "s"}, USER, said, USER])
    client.ask([{"role": "user", "content": "example"}, {"role": "assistant", "content": "no"}, USER])
    completion = client.finish()
    assert completion.history_notes == [
        "the chat template writes the names, ids, or blanks that differ",
        "the tools differ",
        "message 0 (system): the role is system instead of user",
    ]
    assert len(completion.conversations) == 5


def test_bodies_and_conversations_have_a_limit_and_the_client_that_still_sends_gets_the_answer(client):
    most = client.sampler._endpoint._most_bytes
    assert client.post(message(content="x" * most))[0] == 413
    status, answer = client.post(message(content="x" * 13_000_000))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded") and "longer than 12800000" in answer["error"]["message"]
    assert client.ask([USER])["content"] == "yes"
    assert client.finish().finish_reason == "length"


def test_requests_in_flight_and_their_bodies_are_limited_per_episode(client, served, monkeypatch):
    monkeypatch.setattr(endpoint, "_MOST_REQUESTS", 3)
    sockets = []
    for _ in range(3):
        slow = socket.create_connection(("127.0.0.1", client.port))
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nContent-Length: 100\r\n\r\n{{".encode())
        sockets.append(slow)
    waiting = client.sampler._endpoint._clients[client.key]
    while waiting._receiving < 3:
        threading.Event().wait(0.01)
    assert client.post(chat())[0] == 429
    assert Client(*served).ask([USER])["content"] == "yes", "another episode is served"
    for slow in sockets:
        slow.close()
    while waiting._receiving:
        threading.Event().wait(0.01)
    assert client.ask([USER])["content"] == "yes" and waiting._bytes == 0
    monkeypatch.setattr(endpoint, "_MOST_BODIES", 0)
    assert client.post(chat())[0] == 429 and client.finish().calls == 1


def test_what_the_run_breaks_is_the_runs_whatever_its_type(client, monkeypatch):
    def fail(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(client.engine, "generate", fail)
    status, answer = client.post(chat())
    assert (status, answer["error"]["code"]) == (503, "run_failed") and str(client.episode.failure).endswith("(ValueError: a bug)")
    other = Client(client.sampler, client.engine)
    monkeypatch.setattr(client.engine.tokenizer, "encode", fail)
    status, answer = other.post(chat())
    assert (status, answer["error"]["message"]) == (400, "the tokenizer fails on these messages (a bug)") and other.episode.failure is None
