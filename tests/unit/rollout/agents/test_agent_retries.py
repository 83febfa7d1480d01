"""Clients that leave, try again, or send a request twice: only a response that somebody received is a turn of the episode."""

import contextlib
import http.client
import json
import threading
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI
from support.agents import PROBLEM, ChatTokenizer, Policy, config

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import AbortedError
from megatron_rl.rollout.agents import endpoint
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import SamplingParams

USER = {"role": "user", "content": "a"}


class Slow(Policy):
    """Answers its n-th prompt with n, once it may. `aborted` counts the requests that were aborted."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: str(len(self.asked)))
        self.may, self.aborted = threading.Event(), 0

    def generate(self, prompts_B, samplings, abort=None):
        answer = super().generate(prompts_B, samplings)
        ended = threading.Event()
        with abort.calling(ended.set):
            while not (self.may.is_set() or ended.is_set()):
                time.sleep(0.01)
        if ended.is_set():
            self.aborted += 1
            raise AbortedError
        return answer


class Desk:
    def __init__(self, sampler, policy) -> None:
        self.policy, settings = policy, sampler._config
        self.episode = AgentEpisode(PROBLEM, SamplingParams(1.0, 99, seed=3), 5, 0, settings, ChatFormat(ChatTokenizer(), DataConfig()))
        self.url, self.key = sampler._endpoint.url, sampler._endpoint.open(self.episode)
        self.calls = sampler._endpoint._clients[self.key].calls
        self.close = lambda: sampler._endpoint.close(self.key)

    def client(self, **settings) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=self.key, **settings)

    def send(self, *messages, **headers) -> http.client.HTTPConnection:
        """Send a request without waiting for its response, on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(self.url).port, timeout=60)
        body = json.dumps({"messages": list(messages or [USER])})
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {self.key}"} | headers)
        return connection

    def wait_for(self, asked: int, listeners: tuple[int, ...]) -> None:
        """Wait until the policy has been asked, and each call has so many clients."""
        until(lambda: len(self.policy.asked) == asked and tuple(call.listeners for call in self.calls) == listeners)


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def read(connection) -> tuple[int, str]:
    answer = connection.getresponse()
    whole = json.loads(answer.read())
    return answer.status, whole["choices"][0]["message"]["content"] if answer.status == 200 else whole["error"]["code"]


@pytest.fixture
def desk():
    policy = Slow()
    with AgentSampler(config(max_calls=3), policy, ChatTokenizer(), DataConfig()) as sampler:
        yield Desk(sampler, policy)
        policy.may.set()


def finish(desk):
    completion = desk.episode.finish("", None)
    assert completion.calls + completion.dropped_calls == len(desk.policy.asked)
    return [each.text for each in completion.conversations], completion.dropped_calls


def test_a_timeout_and_its_retries_are_one_generation(desk):
    threading.Timer(1.5, desk.policy.may.set).start()
    answer = desk.client(timeout=0.3, max_retries=9).chat.completions.create(model="m", messages=[USER])
    assert (answer.choices[0].message.content, len(desk.policy.asked)) == ("1", 1)
    assert finish(desk) == (["1"], 0)


def test_a_client_that_leaves_ends_the_engines_request_and_costs_none_of_the_calls(desk, monkeypatch):
    monkeypatch.setattr(endpoint, "_RETRY_SECONDS", 0.3)
    for number in range(4):
        connection = desk.send()
        desk.wait_for(number + 1, (1,))
        connection.close()
        until(lambda number=number: desk.policy.aborted == number + 1 and not desk.calls)
    desk.policy.may.set()
    assert read(desk.send()) == (200, "5")
    assert finish(desk) == (["5"], 4)


def test_a_response_that_came_too_late_is_dropped_unless_it_is_asked_for_again_or_continued(desk):
    left = [desk.send({"role": "user", "content": letter}) for letter in "abc"]
    desk.wait_for(3, (1, 1, 1))
    said = {prompt[-5]: str(number + 1) for number, prompt in enumerate(ChatTokenizer().decode(ids, False) for ids, _ in desk.policy.asked)}
    for connection in left:
        connection.close()
    desk.wait_for(3, (0, 0, 0))
    desk.policy.may.set()
    until(lambda: all(call.answer.done() for call in desk.calls))
    assert read(desk.send()) == (200, said["a"]), "the response that nobody received"
    history = [{"role": "user", "content": "b"}, {"role": "assistant", "content": said["b"]}, USER]
    assert read(desk.send(*history)) == (200, "4")
    assert finish(desk) == (["4", said["a"]], 1)


def test_the_same_question_on_purpose_is_asked_twice(desk):
    both = [desk.send(), desk.send()]
    desk.wait_for(2, (1, 1))
    desk.policy.may.set()
    assert {read(connection) for connection in both} == {(200, "1"), (200, "2")}
    assert read(desk.send()) == (200, "3"), "and once more after the others were answered"
    assert sorted(finish(desk)[0]) == ["1", "2", "3"]


def test_a_client_that_says_it_tries_again_joins_what_may_not_have_arrived(desk):
    first = desk.send()
    desk.wait_for(1, (1,))
    second = desk.send(**{"x-stainless-retry-count": "1"})  # whoever is between the two has not closed the first connection
    desk.wait_for(1, (2,))
    desk.policy.may.set()
    assert read(second) == (200, "1") and read(first) == (200, "1")
    assert read(desk.send(**{"x-stainless-retry-count": "2"})) == (200, "1"), "it was sent, and got lost"
    assert finish(desk) == (["1"], 0)


def test_an_idempotency_key_names_one_generation(desk):
    keyed = {"Idempotency-Key": "k"}
    connections = [desk.send(**keyed), desk.send(**keyed)]
    desk.wait_for(1, (2,))
    connections[0].close()
    desk.wait_for(1, (1,))
    desk.policy.may.set()
    assert read(connections[1]) == (200, "1") == read(desk.send(**keyed))
    assert read(desk.send({"role": "user", "content": "b"}, **keyed)) == (400, "idempotency_key_reused")
    assert read(desk.send(**{"Idempotency-Key": "other"})) == (200, "2")
    assert finish(desk)[0] == ["2", "1"]


def test_the_main_conversation_is_the_one_of_the_last_answer(desk):
    desk.policy.may.set()
    ask = lambda *messages, **headers: read(desk.send(*messages, **headers))[1]  # noqa: E731
    first = ask(USER)
    history = [USER, {"role": "assistant", "content": first}]
    ask(*history, {"role": "user", "content": "b"})
    ask({"role": "user", "content": "judge"})
    assert ask(*history, {"role": "user", "content": "b"}, **{"x-stainless-retry-count": "1"}) == "2"
    assert finish(desk)[0] == ["2", "3"]


def test_calls_in_flight_end_with_their_episode(desk):
    connection = desk.send()
    desk.wait_for(1, (1,))
    desk.close()
    assert read(connection) == (499, "request_aborted") and desk.policy.aborted == 1
    assert finish(desk) == ([], 1)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_headers_of_a_stream_come_at_once_and_comments_keep_it_alive(desk, monkeypatch, path):
    monkeypatch.setattr(endpoint, "_KEEP_ALIVE_SECONDS", 0.2)
    body = {"messages": [USER], "input": "a", "stream": True}
    body.pop("messages" if path == "responses" else "input")
    with httpx.stream("POST", f"{desk.url}/{path}", json=body, headers={"x-api-key": desk.key}, trust_env=False, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        comments = [line for line in (next(lines) for _ in range(6)) if line]
        assert len(comments) == 3 and all(line.startswith(":") for line in comments)
        desk.policy.may.set()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert json.dumps(events).count('"1"') >= 1 and finish(desk) == (["1"], 0)


def test_a_stream_that_fails_says_so_to_its_client(desk):
    chunks = desk.client(max_retries=0).chat.completions.create(model="m", messages=[USER], stream=True)
    desk.wait_for(1, (1,))
    desk.close()
    with pytest.raises(openai.APIError, match="the client has left"):
        list(chunks)
    with contextlib.suppress(openai.APIError):
        desk.client(max_retries=0).responses.create(model="m", input="a")
