"""The command `serve`: OpenAI's interface for an export, behind a key, on the CPU."""

import os
import shutil
import signal
import tempfile

import openai
import psutil
import pytest
from openai import OpenAI
from support.models import FP8, make_bf16_checkpoint, write_model
from support.processes import Command, alive_after, command_lines, family, free_port, until

from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.cli.serve import KEY_VARIABLE

SMALL = ("--rollout.max_total_tokens=4096", "--rollout.max_running_requests=4", "--rollout.start_timeout=900")
LONG = 1200.0
ENDLESS = {"ignore_eos": True}
ENDS = {"bf16": (3, "megatron-rl: the engine ended (exit code -9)"), "fp8": (130, "megatron-rl: interrupted")}
USER = {"role": "user", "content": "12+3="}


def make_export(folder, precision):
    (model := folder / f"tiny-{precision}").mkdir()
    make_bf16_checkpoint(model) if precision == "bf16" else write_model(model, "qwen3", FP8)
    shutil.copy(CHAT_TEMPLATE, model)
    return model


@pytest.fixture
def short_folder():
    """A folder whose path is short enough for the Unix sockets of an engine."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        yield folder


def read_lines(folder) -> dict[str, str]:
    """Return what the command has printed: the text behind each label."""
    return dict(line.split(":", 1) for line in (folder / "stdout").read_text().splitlines())


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("precision", ENDS)
def test_an_export_is_served_to_those_who_have_the_key_until_ctrl_c_or_its_own_end(precision, tmp_path, short_folder, monkeypatch):
    export = make_export(tmp_path, precision)
    given = "a-key_of.my~own+/=" if precision == "fp8" else ""
    monkeypatch.setenv(KEY_VARIABLE, given)
    monkeypatch.setenv("TMPDIR", short_folder)
    port, tp = free_port(), 2 if given else 1
    with Command(tmp_path, "megatron_rl", "serve", export, "--port", port, "--tp", tp, *SMALL) as command:
        until(lambda: command.ended() or "log" in read_lines(tmp_path), LONG, "serving")
        assert not command.ended(), command.wait(1)
        printed, processes = read_lines(tmp_path), family(command.pid)
        url, key = f"http://127.0.0.1:{port}/v1", given or printed["API key"].strip()
        assert url in printed["serving"] and len(key) >= 16 and (not given or given not in printed["API key"])
        client = OpenAI(base_url=url, api_key=key, max_retries=0, timeout=600)
        assert [model.id for model in client.models.list()] == [export.name] and client.models.retrieve(export.name).id == export.name
        options = {
            "model": export.name,
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
            "extra_body": {"ignore_eos": True},
        }
        answers = [client.chat.completions.create(messages=[USER], **options).choices[0] for _ in range(2)]
        tokens = answers[0].logprobs.content
        assert len(tokens) == 6 and all(-20 < token.logprob < -0.01 for token in tokens), "of a greedy request, too"
        assert all(token.logprob == token.top_logprobs[0].logprob > token.top_logprobs[1].logprob for token in tokens)
        assert answers[0].message.content == answers[1].message.content
        text = client.completions.create(model=export.name, prompt="12+3=", max_tokens=3, extra_body=ENDLESS)
        assert text.usage.completion_tokens == 3
        asked = [{"role": "user", "content": USER["content"] + more} for more in ("", "<|im_end|>")]
        usages = [client.chat.completions.create(model="m", max_tokens=1, messages=[each], extra_body=ENDLESS).usage for each in asked]
        assert usages[1].prompt_tokens - usages[0].prompt_tokens == len("<|im_end|>"), "it is text, not the end token"
        for other in ("", key[:-1], key + "a", "mrl-0"):
            with pytest.raises(openai.AuthenticationError):
                OpenAI(base_url=url, api_key=other or "none", max_retries=0).chat.completions.create(model="m", messages=[USER])
        assert not any(key in word for words in command_lines(processes).values() for word in words), "readable by every user"
        addresses = {entry.laddr.ip for process in processes for entry in process.net_connections() if entry.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"}
        if given:
            os.kill(command.pid, signal.SIGINT)
        else:
            next(process for process in processes if "rollout_sglang.server" in process.cmdline()).kill()
        done = command.wait(300)
    assert (done.code, done.err.splitlines()[-1]) == ENDS[precision]
    assert command_lines(alive_after(processes, 60)) == {}
    until(lambda: not os.listdir(short_folder), 60, "no temporary file is left")
