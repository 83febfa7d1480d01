"""The endpoint as seen by the `openai` package: chat completions, responses, tools, streams, keys and refusals."""

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI
from support.agents import BOS, PAIR, PROBLEM, ChatTokenizer, Policy, config

from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents import endpoint
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import SamplingParams

TOOL = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "a"}


class Desk:
    """A client, and the episode that it belongs to."""

    def __init__(self, sampler: AgentSampler, policy: Policy) -> None:
        self.sampler, self.policy = sampler, policy
        settings = sampler._config
        self.episode = AgentEpisode(PROBLEM, SamplingParams(1.0, 99, seed=3), 5, 0, settings, ChatFormat(ChatTokenizer(), DataConfig()))
        self.key = sampler._endpoint.open(self.episode)
        self.client = OpenAI(base_url=sampler._endpoint.url, api_key=self.key, max_retries=0)

    def say(self, *messages, **options):
        return self.client.chat.completions.create(model="any", messages=list(messages), **options)


@pytest.fixture(scope="module")
def sampler() -> Iterator[tuple[AgentSampler, Policy]]:
    policy = Policy(lambda prompt: "")
    with AgentSampler(config(tool_parser="letters"), policy, ChatTokenizer(), DataConfig()) as sampler:
        yield sampler, policy


@pytest.fixture
def desk(sampler) -> Desk:
    sampler[1].asked.clear()
    sampler[1].reply = lambda prompt: prompt[-5] * 2
    return Desk(*sampler)


def test_chat_completions(desk):
    answer = desk.say(USER)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason, answer.model) == ("aa", "assistant", "stop", "any")
    assert choice.matched_stop == ord("~"), "the end token"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 3, 11)
    again = desk.say(USER, choice.message, {"role": "user", "content": [{"type": "text", "text": "b"}]}, max_tokens=2)
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("bb", "length")
    assert len(desk.episode.finish("", None).conversations) == 1
    assert [model.id for model in desk.client.models.list()] == ["policy"]


def test_streams(desk):
    *chunks, last = desk.say(USER, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "aa"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"] and not any(chunk.usage for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens, last.usage.total_tokens) == ([], 3, 11)
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        chunks = list(desk.say(USER, stream=True, **options))
        assert len(chunks) == 2 and "usage" not in chunks[0].model_fields_set | chunks[1].model_fields_set
    texts = list(desk.client.completions.create(model="any", prompt="abcde", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in texts[:-1]) == "aa" and texts[-2].choices[0].finish_reason == "stop"
    assert texts[-1].choices == [] and texts[-1].usage.prompt_tokens == 6


def test_streamed_tool_calls(desk):
    desk.policy.reply = lambda prompt: "so!python:2+2"
    first, last = desk.say(USER, tools=[TOOL], stream=True)
    (call,) = first.choices[0].delta.tool_calls
    assert (call.index, call.function.name, last.choices[0].finish_reason) == (0, "python", "tool_calls")


def test_texts_are_completed_without_a_template(desk):
    desk.policy.reply = lambda prompt: "b" * 30
    answer = desk.client.completions.create(model="any", prompt=["aa"])
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, answer.object, answer.model) == ("b" * 16, "length", "text_completion", "any")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16) and desk.policy.asked[0][0] == [BOS, PAIR + 97]
    for prompt, rule in (("", None), (["a", "b"], "prompt"), ([1, 2], "prompt"), ([[1]], "prompt"), (5, "prompt"), ([], "prompt")):
        with contextlib.nullcontext() if rule is None else pytest.raises(openai.BadRequestError, match=rule):
            desk.client.completions.create(model="any", prompt=prompt, max_tokens=1)


def test_a_text_that_repeats_a_text_and_its_response_continues_the_sampled_tokens(desk):
    def complete(prompt, said, **options):
        desk.policy.reply = lambda _: said
        return desk.client.completions.create(model="any", prompt=prompt, **options).choices[0].text

    first = complete("aa", "bb", max_tokens=2)
    second = complete("aa" + first + "cc", "xxO:x", stop=["O:"], max_tokens=5)
    third = complete("aabbcc" + second + "O:d", "end", max_tokens=9)
    assert (first, second, third) == ("bb", "xx", "end")
    b, x = ord("b"), ord("x")
    known = [BOS, PAIR + 97, b, b, PAIR + 99]  # the letters as they were sampled, and the texts as they are encoded
    assert desk.policy.asked[1][0] == known and desk.policy.asked[2][0] == [*known, x, x, *map(ord, "O:xd")]
    complete("aabbccxxO:dend more", "y", max_tokens=1)  # what the end token ended continues the response before
    assert desk.policy.asked[3][0][: len(known) + 5] == desk.policy.asked[2][0][:-1]
    complete("aabb", "y", max_tokens=1)  # without more text, the question is asked again
    with pytest.raises(openai.NotFoundError, match="is not a response of this episode"):
        desk.client.responses.create(model="any", input="a", previous_response_id="resp_0")
    desk.say({"role": "user", "content": "aabbcc"})
    completion = desk.episode.finish("", None)
    assert (completion.calls, len(completion.conversations), completion.foreign_histories) == (6, 4, 0)


def test_models_unknown_paths_and_methods_are_answered_as_openai_does(desk):
    assert desk.client.models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="does not exist") as refused:
        desk.client.models.retrieve("org/other")
    assert refused.value.code == "model_not_found"
    url = desk.sampler._endpoint.url
    for method, path, status, code in (
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/embeddings", 404, "unknown_url"),
        ("POST", "/chat", 404, "unknown_url"),
        ("GET", "/../metrics", 404, "unknown_url"),
        ("GET", "/chat/completions", 405, "method_not_supported"),
        ("DELETE", "/models/policy", 405, "method_not_supported"),
        ("PUT", "/completions", 405, "method_not_supported"),
    ):
        answer = httpx.request(method, url + path, headers={"Authorization": f"Bearer {desk.key}"}, trust_env=False)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert error["message"].startswith(f"invalid URL ({method} ") and error["param"] is None
    for path in ("/models", "/models/policy"):
        answer = httpx.get(url + path, headers={"Authorization": "Bearer no"}, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


NEUTRAL = {
    "n": [1, 1.0, None], "best_of": [1], "frequency_penalty": [0, 0.0, -0.0], "presence_penalty": [0.0], "repetition_penalty": [1.0],
    "logit_bias": [{}], "logprobs": [False], "top_logprobs": [0, None], "store": [True, False], "user": ["u"],
    "service_tier": ["auto", "flex"], "metadata": [{"a": "b"}], "seed": [7],
    "response_format": [{"type": "text"}], "modalities": [["text"]],
    "tool_choice": ["auto", "none"], "functions": [[]], "function_call": ["none"], "stop_token_ids": [[]], "min_tokens": [0],
    "ignore_eos": [False], "use_beam_search": [False], "echo": [False], "suffix": ["", None], "skip_special_tokens": [True],
    "text": [{"format": {"type": "text"}, "verbosity": "medium"}], "parallel_tool_calls": [True, False], "prompt_cache_key": ["k"],
    "reasoning_effort": [None], "chat_template_kwargs": [{}, None], "prediction": [None], "web_search_options": [None], "unknown": [None],
}  # fmt: skip
CHANGING = {
    "n": [2, 0, True], "best_of": [3, 0], "frequency_penalty": [0.1, -1], "repetition_penalty": [1.1, 0], "logit_bias": [{"5": -100}],
    "logprobs": [True, 0, 5], "top_logprobs": [3], "response_format": [{"type": "json_object"}], "modalities": [["text", "audio"]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "python"}}], "functions": [[{"name": "f"}]], "min_tokens": [5],
    "ignore_eos": [True], "echo": [True], "suffix": ["x"], "skip_special_tokens": [False], "enable_thinking": [False, True],
    "chat_template_kwargs": [{"enable_thinking": False}], "thinking": [{"type": "disabled"}], "reasoning_effort": ["low", "none"],
    "web_search_options": [{}], "guided_json": [{}],
    "text": [{"format": {"type": "json_schema"}}, {"verbosity": "low"}], "unknown": [True, 5, "x"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NEUTRAL.keys() | CHANGING.keys()))
def test_values_that_change_nothing_are_accepted_and_all_others_refused(desk, name):
    for value in NEUTRAL.get(name, ()):
        assert desk.say(USER, extra_body={name: value}).choices[0].message.content == "aa", value
    for value in CHANGING.get(name, ()):
        with pytest.raises(openai.BadRequestError, match=f"{name}: .* is not supported here"):
            desk.say(USER, extra_body={name: value})


def test_tools_are_called_and_answered(desk):
    desk.policy.reply = lambda prompt: "4" if "<t>" in prompt else "so!python:2+2"
    called = desk.say(USER, tools=[TOOL]).choices[0]
    (call,) = called.message.tool_calls
    assert (called.message.content, called.finish_reason, call.function.name) == ("so", "tool_calls", "python")
    assert json.loads(call.function.arguments) == {"code": "2+2"}
    last = desk.say(USER, called.message, {"role": "tool", "tool_call_id": call.id, "content": "four"}, tools=[TOOL]).choices[0]
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == ("4", None, "stop")
    completion = desk.episode.finish("", None)
    assert len(completion.conversations) == 1 and completion.dialogue == ["so!python:2+2", "<t>four<a>", "4"]


@pytest.mark.parametrize("said", ["so!python", "so!!"])
def test_a_call_that_cannot_be_read_is_text_and_counted(desk, said):
    desk.policy.reply = lambda prompt: said
    assert desk.say(USER, tools=[TOOL]).choices[0].message.content == said
    assert desk.episode.finish("", None).tool_errors == 1


def test_a_stop_text_ends_what_the_agent_sees_and_not_what_is_trained_on(desk):
    desk.policy.reply = lambda prompt: "xSTOPy"  # the last token holds more than the stop text
    choice = desk.say(USER, stop="STOP").choices[0]
    assert (choice.message.content, choice.matched_stop) == ("x", "STOP")
    assert desk.policy.asked[0][1].stop == ("STOP",) and desk.episode.finish("", None).sampled_count == 7


def test_responses_and_their_history(desk):
    first = desk.client.responses.create(model="any", input="a", instructions="be brief")
    assert (first.output_text, first.status, first.usage.output_tokens) == ("aa", "completed", 3)
    second = desk.client.responses.create(model="any", input="b", instructions="be brief", previous_response_id=first.id)
    assert second.output_text == "bb"
    assert len(desk.episode.finish("", None).conversations) == 1, "the same conversation goes on"


def test_responses_call_tools(desk):
    desk.policy.reply = lambda prompt: "4" if "<t>" in prompt else "so!python:2+2"
    tool = {"type": "function", **TOOL["function"]}
    first = desk.client.responses.create(model="any", input="a", tools=[tool])
    text, call = first.output
    assert (text.content[0].text, call.type, call.name, json.loads(call.arguments)) == ("so", "function_call", "python", {"code": "2+2"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "four"}
    by_id = desk.client.responses.create(model="any", input=[output], tools=[tool], previous_response_id=first.id)
    whole = desk.client.responses.create(model="any", input=[USER, text.model_dump(), call.model_dump(), output], tools=[tool])
    assert by_id.output_text == whole.output_text == "4"
    assert desk.episode.finish("", None).calls == 3


def test_sampling_options_are_overridden_and_options_that_would_change_answers_are_refused(desk):
    desk.say(USER, temperature=0.1, top_p=0.5, seed=9)
    assert desk.policy.asked[0][1].temperature == 1.0 and desk.policy.asked[0][1].seed == 3
    for options, rule in (
        ({"n": 2}, "n: 2 is not supported"),
        ({"logprobs": True}, "logprobs: true is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ):
        with pytest.raises(openai.BadRequestError, match=rule):
            desk.say(USER, **options)
    for messages, rule in (
        ([], "must not end with"),
        ([{"role": "critic", "content": ""}], "messages.0: role must be one of system"),
        ([USER, {"role": "assistant"}], "must not end"),
    ):
        with pytest.raises(openai.BadRequestError, match=rule):
            desk.say(*messages)
    with pytest.raises(openai.BadRequestError, match="only text is supported"):
        desk.say({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    with pytest.raises(openai.NotFoundError, match="is not a response of this episode"):
        desk.client.responses.create(model="any", input="a", previous_response_id="resp_9")


def test_keys_are_of_one_running_episode(sampler, desk):
    other = Desk(*sampler)
    threads = [threading.Thread(target=each.say, args=(USER,)) for each in (desk, other, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert desk.episode.finish("", None).calls == 1 and other.episode.finish("", None).calls == 2
    with pytest.raises(openai.AuthenticationError, match="has ended"):
        desk.say(USER)
    sampler[0]._endpoint.close(desk.key)
    with pytest.raises(openai.AuthenticationError, match="a running episode"):
        desk.say(USER)


@pytest.fixture
def open_connections(monkeypatch):
    """Call with the seconds until a first request: return a sampler, its policy, and 40 connections, every second one with half a head."""
    monkeypatch.setattr(endpoint, "_MOST_REQUESTS", 8)
    with contextlib.ExitStack() as stack:

        def open_connections(seconds: float):
            monkeypatch.setattr(endpoint, "_FIRST_REQUEST_SECONDS", seconds)
            policy = Policy(lambda prompt: "yes")
            sampler = stack.enter_context(AgentSampler(config(workers=2), policy, ChatTokenizer(), DataConfig()))
            address = ("127.0.0.1", urlsplit(sampler._endpoint.url).port)
            connections = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
            for connection in connections[::2]:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le")
            return sampler, policy, connections

        yield open_connections


def count_closed(connections: list[socket.socket], wanted: int) -> int:
    """Return how many connections the server has closed, after at most 60 seconds or once the wanted number is reached."""
    closed, end = set(), time.monotonic() + 60
    while len(closed) < wanted and time.monotonic() < end:
        closed.update(select.select([connection for connection in connections if connection not in closed], [], [], 1)[0])
    return len(closed)


def test_no_more_connections_than_requests_in_flight_are_held(open_connections):
    sampler, policy, connections = open_connections(600.0)
    assert count_closed(connections, 24) == 24
    held = sampler._endpoint._server.server_state.connections
    assert len(held) == 16, "two agents with eight requests each"
    for connection in connections:
        connection.close()
    while held:
        time.sleep(0.01)
    assert Desk(sampler, policy).say(USER).choices[0].message.content == "yes"


def test_connections_without_a_request_are_closed(open_connections):
    sampler, policy, connections = open_connections(1.0)
    assert count_closed(connections, 40) == 40
    assert Desk(sampler, policy).say(USER).choices[0].message.content == "yes"
