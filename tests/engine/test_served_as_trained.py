"""`serve` reads tool calls and thoughts as the endpoint for agents does, and samples as the run did."""

import json
import os
from itertools import product

import httpx
import numpy as np
from openai import OpenAI
from support.agents import PROBLEM, config
from support.processes import ROOT, Command, free_port, until
from test_serve import LONG, SMALL, make_export, read_lines
from transformers import AutoTokenizer

from megatron_rl.cli.serve import KEY_VARIABLE
from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.engine import ParsedToolCalls
from megatron_rl.types import Generation, SamplingParams

PARSERS = {"tool_parser": "qwen", "reasoning_parser": "qwen3"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHTS = ("", "<think>\nwhy\n</think>\n\n", f"<think>{CALL}</think>", "<think>no end ", "no start</think>")
ANSWERS = (
    "four", f"so {CALL}", f"{CALL}\n{CALL}", '<tool_call>\n{"name": "add"', "<tool_call>\nadd(1)\n</tool_call> and more",
    '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', f"{CALL} behind", "", '{"name": "add", "arguments": {}}', "a < b && é",
)  # fmt: skip
RUN = """
[model]
path = "{model}"
[rollout]
temperature = 0.7
top_p = 0.9
[agent]
command = ["x"]
tool_parser = "qwen"
reasoning_parser = "qwen3"
"""


class Parsing:
    """An engine that responds with the last message, and parses by a served engine."""

    def __init__(self, tokenizer, url, key) -> None:
        self._tokenizer, self.reply = tokenizer, ""
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=600)

    def generate(self, prompts_B, samplings, abort=None):
        ids = np.array([*self._tokenizer.encode(self.reply, add_special_tokens=False), self._tokenizer.eos_token_id], np.int32)
        return [Generation(ids, np.zeros(len(ids), np.float32), "stop", 5)]

    def _post(self, path, body):
        answer = self._http.post(path, json=body)
        return answer.json() if answer.status_code == 200 else None

    def parse_tool_calls(self, text, tools, parser):
        found = self._post("/parse_function_call", {"text": text, "tools": json.loads(tools), "tool_call_parser": parser})
        return found and ParsedToolCalls(found["normal_text"], [(call["name"], call["parameters"]) for call in found["calls"]])

    def separate_thought(self, text, parser):
        found = self._post("/separate_reasoning", {"text": text, "reasoning_parser": parser})
        return found and (found["reasoning_text"] or "", found["text"] or "")


def show(message):
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return (message.content or "").strip(), (getattr(message, "reasoning_content", None) or "").strip(), calls


def test_the_same_responses_are_read_alike_and_the_runs_sampling_is_the_default(tmp_path, monkeypatch):
    export, port = make_export(tmp_path, "bf16"), free_port()
    (export / "generation_config.json").write_text(json.dumps({"temperature": 0.1, "top_k": 3, "repetition_penalty": 1.5}))
    (tmp_path / "run.toml").write_text(RUN.format(model=export))
    monkeypatch.setenv(KEY_VARIABLE, "key")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))
    start = ("serve", export, "--port", port, "--config", tmp_path / "run.toml", "--rollout.top_p=0.8", *SMALL)
    with Command(tmp_path, "echo_server", *start) as command:
        until(lambda: command.ended() or "log" in read_lines(tmp_path), LONG, "serving")
        assert not command.ended(), command.wait(1)
        assert "temperature 0.7, top_p 0.8, top_k -1, min_p 0" in read_lines(tmp_path)["sampling"]
        url = f"http://127.0.0.1:{port}"
        tokenizer = AutoTokenizer.from_pretrained(export)
        engine = Parsing(tokenizer, url, "key")
        settings = config(**PARSERS, max_calls=1000)
        with AgentSampler(settings, engine, tokenizer, DataConfig()) as sampler:
            episode = AgentEpisode(PROBLEM, SamplingParams(1.0, 999), 5, 0, settings, ChatFormat(tokenizer, DataConfig()))
            trained = OpenAI(base_url=sampler._endpoint.url, api_key=sampler._endpoint.open(episode), max_retries=0)
            served = OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0)
            for thought, answer in product(THOUGHTS, ANSWERS):
                text = engine.reply = thought + answer
                for options in ({}, {"tools": TOOLS}):
                    asked = {"model": export.name, "messages": [{"role": "user", "content": text}], **options}
                    both = [client.chat.completions.create(max_tokens=most, **asked) for client, most in ((trained, 500), (served, 2))]
                    assert show(both[0].choices[0].message) == show(both[1].choices[0].message), (text, options)
        ask = lambda **options: served.chat.completions.create(  # noqa: E731
            model=export.name, messages=[{"role": "user", "content": "sampling "}], max_tokens=1, **options
        )
        shown = [json.loads(ask(**options).choices[0].message.content.removeprefix("sampling ")) for options in ({}, {"temperature": 0.2})]
        assert shown[0] == {"temperature": 0.7, "top_p": 0.8, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert shown[1] == shown[0] | {"temperature": 0.2}
        body = {
            "model": export.name,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": f"so {CALL}"}],
            "tools": [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
        }
        answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "key"}, trust_env=False, timeout=600).json()
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"], answer
        assert httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "no"}, trust_env=False).status_code == 401
