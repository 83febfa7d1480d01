"""The four interfaces: every option has a row in docs/reference/endpoint.md, which the code follows, and events come in order."""

import json
import re
import typing
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from support.agents import PROBLEM, ChatTokenizer, Policy, config

from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.endpoint import FORMS
from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.messages import fits_schema
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import SamplingParams

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "endpoint.md"
PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"], "additionalProperties": False}
BODIES = dict(zip(PATHS, ({"messages": [USER]}, {"prompt": "a"}, {"input": "a"}, {"messages": [USER], "max_tokens": 50}), strict=True))


def read_tables() -> dict[str, list[set[str]]]:
    """Return the options of the four rows, by path."""
    parts = re.split(r"^## /v1(/\S+).*$", PAGE.read_text().partition("## Values of")[0], flags=re.MULTILINE)[1:]
    rows = [[set(re.findall(r"`(\w+)`", row.split("|")[2])) for row in part.splitlines() if "`" in row] for part in parts[1::2]]
    return dict(zip(parts[::2], rows, strict=True))


def load_schemas() -> dict[str, object]:
    schemas = {
        "/chat/completions": chat_params.CompletionCreateParamsStreaming,
        "/completions": completion_create_params.CompletionCreateParamsStreaming,
        "/responses": response_create_params.ResponseCreateParamsStreaming,
    }
    try:
        from anthropic.types.beta import message_create_params
    except ImportError:  # the package is not among the tests'; the page was compared with it by hand
        return schemas
    return schemas | {"/messages": message_create_params.MessageCreateParamsStreaming}


@pytest.mark.parametrize("path", load_schemas())
def test_every_option_of_the_clients_has_a_row(path):
    assert set(typing.get_type_hints(load_schemas()[path])) <= set().union(*read_tables()[path])


MODELS = {form.path.removeprefix("/v1"): form for form in FORMS}


@pytest.mark.parametrize("path", PATHS)
def test_the_tables_are_what_the_code_does(path, desk):
    tables = read_tables()
    honored, run, labels, refused = tables[path]
    others = set().union(*(row for table in tables.values() for row in table)) - set().union(*tables[path])  # of the other interfaces
    model = MODELS[path]
    assert (run, labels) == (set(model.decided), set(model.labels))
    assert honored - {"tool_choice"} == model.list_honored() - {*model.decided, "tool_choice"} and not (run | labels | refused) & honored
    for name in refused | others | {"unknown"}:
        status, answer = desk.post(path, {**BODIES[path], name: {"a": 1}})
        assert status == 400 and f"{name}: " in json.dumps(answer), name
    for name in refused:
        assert desk.post(path, {**BODIES[path], name: None})[0] == 200, name
    for name in labels | (run - model.list_honored()):
        assert desk.post(path, {**BODIES[path], name: {"a": 1}})[0] == 200, name


class Desk:
    def __init__(self, sampler, policy) -> None:
        self.policy, settings = policy, sampler._config
        self.episode = AgentEpisode(PROBLEM, SamplingParams(1.0, 999), 5, 0, settings, ChatFormat(ChatTokenizer(), DataConfig()))
        self.url, self.key = sampler._endpoint.url, sampler._endpoint.open(self.episode)
        self.client = OpenAI(base_url=self.url, api_key=self.key, max_retries=0)

    def post(self, path, body):
        answer = httpx.post(self.url + path, json=body, headers={"x-api-key": self.key}, trust_env=False, timeout=60)
        return answer.status_code, answer.json() if "json" in answer.headers["content-type"] else read_events(answer.text)


def read_events(text):
    """Return the events of a stream, whose names are their types."""
    events = []
    for part in text.split("\n\n"):
        if part and not part.startswith(":"):
            name, _, data = part.partition("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture(scope="module")
def sampler():
    policy = Policy(lambda prompt: "")
    settings = config(tool_parser="letters", max_calls=1000, max_tokens=50_000)
    with AgentSampler(settings, policy, ChatTokenizer(), DataConfig()) as sampler:
        yield sampler, policy


@pytest.fixture
def desk(sampler):
    sampler[1].reply = lambda prompt: "4" if "<t>" in prompt else "so!python:2+2" if "[python]" in prompt else "hi"
    return Desk(*sampler)


def test_responses_are_streamed_as_typed_events_in_order(desk):
    tool = {"type": "function", "name": "python", "parameters": SCHEMA, "strict": True}
    with desk.client.responses.stream(model="m", input="a", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [event.type.removeprefix("response.") for event in events] == ["created", "in_progress", *text, *call, "completed"]
    assert [event.sequence_number for event in events] == list(range(13))
    said, called = final.output
    assert (said.content[0].text, called.name, called.arguments) == ("so", "python", '{"code": "2+2"}')
    assert (final.usage.input_tokens, final.usage.output_tokens) == (16, 14)
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "four"}
    history = [USER, said.model_dump(), called.model_dump(), output]
    (last,) = [event for event in desk.client.responses.create(model="m", input=history, tools=[tool], stream=True)][-1:]
    assert last.response.output_text == "4" and len(desk.episode.finish("", None).conversations) == 1


def test_a_response_that_is_cut_ends_as_incomplete(desk):
    events = list(desk.client.responses.create(model="m", input="a", max_output_tokens=1, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_messages_with_tools_go_on_from_the_sampled_tokens_streamed_or_not(desk):
    body = {"system": [{"type": "text", "text": "s"}], "tools": [{"name": "python", "input_schema": SCHEMA}], "max_tokens": 50}
    status, first = desk.post("/messages", {**body, "messages": [USER]})
    assert (status, first["stop_reason"], first["usage"]["output_tokens"]) == (200, "tool_use", 14)
    assert [block["type"] for block in first["content"]] == ["text", "tool_use"] and first["content"][1]["input"] == {"code": "2+2"}
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": [{"type": "text", "text": "four"}]}
    history = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    counted = desk.post("/messages/count_tokens", {**body, "messages": history})
    _, events = desk.post("/messages", {**body, "messages": history, "stream": True})
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block, "message_delta", "message_stop"]
    assert events[2]["delta"] == {"type": "text_delta", "text": "4"} and events[-2]["delta"]["stop_reason"] == "end_turn"
    assert counted == (200, {"input_tokens": events[0]["message"]["usage"]["input_tokens"]})
    completion = desk.episode.finish("", None)
    assert (completion.calls, len(completion.conversations), completion.foreign_histories) == (2, 1, 0)


def test_messages_are_refused_as_anthropic_does(desk):
    for changes, status, kind in (
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": 5}]}]}, 400, "invalid_request_error"),
        ({"output_config": {"format": {}}}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
        ({"tools": [{"name": "f", "defer_loading": True}]}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
    ):
        got, answer = desk.post("/messages", BODIES["/messages"] | changes)
        assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind), changes
    desk.key = "no"
    assert desk.post("/messages", BODIES["/messages"])[1]["error"]["type"] == "authentication_error"


def test_only_the_first_call_is_returned_if_calls_must_not_be_parallel(desk, monkeypatch):
    two = type("Parsed", (), {"text": "so", "calls": [("python", "{}"), ("python", '{"code": ""}')]})()
    monkeypatch.setattr(desk.policy, "parse_tool_calls", lambda *_: two)
    tools = [{"type": "function", "function": {"name": "python", "parameters": SCHEMA}}]
    ask = lambda **options: desk.client.chat.completions.create(model="m", messages=[USER], tools=tools, **options)  # noqa: E731
    assert [len(ask(parallel_tool_calls=each).choices[0].message.tool_calls) for each in (True, False)] == [2, 1]
    (either,) = desk.post(
        "/messages",
        {**BODIES["/messages"], "tools": [{"name": "python"}]} | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    )[1]["content"][1:]
    assert either["type"] == "tool_use"
    tools[0]["function"]["strict"] = True
    assert ask().choices[0].message.tool_calls is None, "the first call does not fit the schema"


def test_arguments_fit_a_schema():
    tools = json.dumps([{"function": {"name": "f", "parameters": SCHEMA}}, {"function": {"name": "g"}}])
    fits = {'{"code": "1"}': True, '{"code": 1}': False, "{}": False, "[]": False, "no": False, '{"code": "1", "x": 1}': False}
    assert {arguments: fits_schema(tools, "f", arguments) for arguments in fits} == fits and fits_schema(tools, "g", "{}")
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    assert fits_schema(json.dumps([{"function": {"name": "f", "parameters": slow}}]), "f", json.dumps({"a": "a" * 60 + "b"}))
