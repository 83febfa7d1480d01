"""An agent behind a proxy that drops, delays, loses, and repeats what it forwards. It notes the responses that it receives."""

import json
import os
import random
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
from openai import OpenAI

from megatron_rl.rewards.thinking import decode_completion

FOLDER_VARIABLE = "MEGATRON_RL_TEST_RECEIVED"
FAULTS = ("none", "drop", "delay", "lose", "repeat")
PATIENCE, DELAY, EARLY = 2.0, 3.0, 0.1  # seconds: of the client, of a delay, and until a request is abandoned
WORDS = 12  # tokens of a response, at most
HELD = "held-*"  # files of requests that will be abandoned before they may be answered


class HoldingEngine:
    """An engine that answers no request while one is to be abandoned, so that a proxy has closed its connection before, also on a busy
    machine."""

    def __init__(self, engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *arguments, **options):
        answers = self._engine.generate(*arguments, **options)
        while any(self._folder.glob(HELD)):
            time.sleep(0.01)
        return answers


class LossyProxy:
    """Forwards each request with a fault of its own, one request per connection."""

    def __init__(self, url: str, seed: int, folder: Path, early: float = EARLY) -> None:
        self._target, self._random, self._folder = (urlsplit(url).hostname, urlsplit(url).port), random.Random(seed), folder
        self._early = early
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url, self.faults = f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1", list[str]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            request = self._read_message(client)
            if not request:
                return
            self.faults.append(fault := self._random.choice(FAULTS))
            if fault in ("drop", "repeat"):
                held = self._folder / HELD.replace("*", uuid.uuid4().hex)
                held.touch()
                with self._send(request):
                    time.sleep(self._random.random() if fault == "drop" else self._early)
                held.unlink()
                if fault == "drop":
                    return
            with self._send(request) as engine:
                answer = b"".join(iter(lambda: engine.recv(1 << 16), b""))
            if fault == "delay":
                time.sleep(DELAY)
            if fault != "lose":
                client.sendall(answer)

    def _send(self, request: bytes) -> socket.socket:
        engine = socket.create_connection(self._target)
        engine.sendall(request)
        return engine

    def _read_message(self, client: socket.socket) -> bytes:
        """Return a whole request that closes its connection."""
        head, _, body = self._read_until(client, b"", lambda data: b"\r\n\r\n" in data).partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        body = self._read_until(client, body, lambda data: len(data) >= length)
        return b"\r\n".join([*lines, b"Connection: close", b"", body]) if head else b""

    def _read_until(self, client: socket.socket, data: bytes, enough) -> bytes:
        while not enough(data) and (part := client.recv(1 << 16)):
            data += part
        return data


def list_trained(completion, tokenizer):
    """Return text and number of tokens of each response that is trained on."""
    found = []
    for each in completion.conversations:
        ends = np.flatnonzero(np.diff(np.concatenate([[False], each.response_mask_T, [False]])))
        for start, end in ends.reshape(-1, 2):
            found.append([decode_completion(tokenizer, each.output_ids_T[start:end].tolist()), int(end - start)])
    return sorted(found)


def converse(problem):
    """Hold one conversation by an interface that is chosen at random, with an engine that may answer at once."""
    folder, dice = Path(os.environ[FOLDER_VARIABLE]), random.Random()
    proxy = LossyProxy(os.environ["OPENAI_BASE_URL"], dice.randrange(1 << 30), folder, early=0)
    client, ask = Client(base_url=proxy.url, timeout=PATIENCE, max_retries=40), dice.choice((_chat, _stream, _respond, _message))
    messages, received = [], []
    for number in range(3):
        messages.append({"role": "user", "content": f"{number} of {problem.id}"})
        received.append(ask(client, messages))
        messages.append({"role": "assistant", "content": received[-1][0]})
    noted = {"interface": ask.__name__, "received": received, "faults": proxy.faults}
    (folder / f"{problem.id}-{uuid.uuid4().hex}").write_text(json.dumps(noted))


def _chat(client, messages):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=WORDS)
    return answer.choices[0].message.content, answer.usage.completion_tokens


def _stream(client, messages):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="policy", messages=messages, max_tokens=WORDS, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), last.usage.completion_tokens


def _respond(client, messages):
    answer = client.responses.create(model="policy", input=messages, max_output_tokens=WORDS)
    return answer.output_text, answer.usage.output_tokens


def _message(client, messages):
    """As Anthropic's client asks, which says how often it has tried."""
    body, key = {"model": "policy", "max_tokens": WORDS, "messages": messages}, os.environ["OPENAI_API_KEY"]
    for attempt in range(40):
        headers = {"x-api-key": key, "x-stainless-retry-count": str(attempt)}
        with suppress(httpx.TransportError):
            answer = httpx.post(f"{client.base_url}messages", json=body, headers=headers, timeout=PATIENCE, trust_env=False)
            answer.raise_for_status()
            return "".join(part["text"] for part in answer.json()["content"]), answer.json()["usage"]["output_tokens"]
        time.sleep(0.1)
    raise TimeoutError


class Client(OpenAI):
    """Tries again soon, instead of after up to 8 seconds."""

    def _calculate_retry_timeout(self, *_, **__):
        return 0.1


def solve(problem):
    """Hold two conversations with the same questions at the same time, one of them streamed."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    proxy = LossyProxy(os.environ["OPENAI_BASE_URL"], int(problem.id), folder)
    client, received = Client(base_url=proxy.url, timeout=PATIENCE, max_retries=40), []

    def converse(stream):
        messages = []
        for number in range(3):
            messages.append({"role": "user", "content": f"{number} of {problem.id}"})
            answer = client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=40,
                **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
            )
            if stream:
                *chunks, last = answer
                text, count = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), last.usage.completion_tokens
            else:
                text, count = answer.choices[0].message.content, answer.usage.completion_tokens
            messages.append({"role": "assistant", "content": text})
            received.append([text, count])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(converse, (False, True)))
    (folder / problem.id).write_text(json.dumps({"received": received, "faults": proxy.faults}))
