"""Columns that stay at the engine: its server keeps the arrays and the text of an answer, and rank 0 gets only their length, a digest of
the tokens, and the sum of the log-probs. The ranks that train on the completion fetch the arrays, so they never pass rank 0.

The server drops the columns of a policy version once no trainer takes them any more: when an answer comes that is more than
`placement.max_staleness` versions newer. It therefore holds what rank 0 would hold, divided by the number of engines."""

import asyncio
import functools
import hashlib
import json
import threading
import time
import uuid
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np

from megatron_rl.config.hosts import is_loopback
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.redaction import hold
from megatron_rl.rewards.thinking import Response
from megatron_rl.types import ColumnPlace, Generation, RemoteColumns, group_by_engine
from parallel.transport.process_group import runs_on_one_node
from rollout_sglang.access import KEEP_ALIVE_SECONDS
from rollout_sglang.answers import IDS, LOGPROBS, MEDIA_TYPE, Answer, Remains, read_answers, read_generation

HEADER = "x-megatron-rl-columns"
FETCH, FIND = "/megatron_rl/columns", "/megatron_rl/find_columns"
_TRIES, _WAIT_SECONDS, _THREADS = 3, 1.0, 8


@dataclass
class Kept:
    """A completion in the store."""

    answer: Answer  # with its prompt, without its text
    text: str
    response: Response | None = None  # the parts of the text, once it has been scored


class ColumnStore:
    """The columns in an engine's server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_version: dict[int, dict[str, Kept]] = {}

    def leave(self, prompt: Sequence[int], answer: Answer, place: ColumnPlace, staleness: int) -> Answer:
        """Keep the columns of the answer to a prompt, and the text if `place` says so. Return what remains."""
        if place == "here" or not answer.version:  # the engine has dropped the completion
            return answer
        handle, version = uuid.uuid4().hex, int(answer.version)
        about = answer.finish, answer.version, answer.spans, answer.cached_tokens
        logprobs_T = np.frombuffer(answer.kept_logprobs or answer.logprobs, LOGPROBS)
        remains = Remains(handle, len(answer.ids) // IDS.itemsize, compute_digest(answer), float(np.sum(logprobs_T)))
        left = Answer(*about, bytearray(), bytearray(), text=answer.text if place == "but_text" else None, remains=remains)
        kept = Kept(answer, answer.text or "")
        answer.text, answer.prompt = None, bytearray(np.asarray(prompt, IDS))
        with self._lock:
            for old in [known for known in self._by_version if known + staleness < version]:
                del self._by_version[old]
            self._by_version.setdefault(version, {})[handle] = kept
        return left

    def get(self, handles: Sequence[str]) -> list[Kept | None]:
        """Return what is kept, or None for what was dropped."""
        with self._lock:
            kept = ChainMap(*self._by_version.values())
            return [kept.get(handle) for handle in handles]


store = ColumnStore()  # of this server


def compute_digest(answer: Answer) -> str:
    """Return a digest of the tokens of an answer with columns."""
    return hashlib.blake2b(answer.ids, digest_size=16).hexdigest()


def add_routes(app: Any) -> None:
    """Let a server that has not started yet give columns away."""
    from starlette.responses import JSONResponse
    from starlette.responses import Response as Reply

    async def fetch(request: Any) -> Any:
        answers = [kept and kept.answer for kept in store.get(await request.json())]
        return Reply(await asyncio.to_thread(msgspec.msgpack.encode, answers), media_type=MEDIA_TYPE)

    async def find(request: Any) -> Any:
        handles = await request.json()
        return JSONResponse([handle for handle, kept in zip(handles, store.get(handles), strict=True) if kept is not None])

    app.add_route(FETCH, fetch, methods=["POST"])
    app.add_route(FIND, find, methods=["POST"])


def ask_to_leave(place: ColumnPlace, staleness: int) -> dict[str, str]:
    """Return the headers with which a client says where columns stay."""
    return {} if place == "here" else {HEADER: json.dumps([place, staleness])}


def read_place(headers: Mapping[str, str]) -> tuple[ColumnPlace, int]:
    place, staleness = json.loads(headers.get(HEADER, '["here", 0]'))
    return place, staleness


def choose_place(wanted: ColumnPlace, url: str) -> ColumnPlace:
    """Return where the columns of an engine at `url` go: through rank 0 if it listens on loopback, as those on rank 0's node do, and
    replicas on other nodes cannot reach it; else as wanted."""
    return "here" if is_loopback(urlsplit(url).hostname or "") and not runs_on_one_node() else wanted


def fetch_columns(columns_B: Sequence[RemoteColumns], records_kept: bool, routing: RoutingShape | None, timeout: float) -> list[Generation]:
    """Return completions with the columns that engines keep, and their prompts. Raise EngineLostError if an engine does not answer in
    `timeout` seconds, or RunError if it gives other columns."""
    by_engine = group_by_engine(columns_B)

    def fetch(engine: tuple[str, str], own: list[RemoteColumns]) -> Iterable[tuple[str, Answer | None]]:
        handles = [columns.handle for columns in own]
        return zip(handles, _ask(*engine, handles, timeout), strict=True)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="megatron-rl-columns") as threads:
        answers = dict(chain.from_iterable(threads.map(fetch, by_engine.keys(), by_engine.values())))

    def read(columns: RemoteColumns) -> Generation:
        answer = answers[columns.handle]
        if answer is None or compute_digest(answer) != columns.digest:
            what = "no longer has the tokens of a completion" if answer is None else "has other tokens of a completion than it told"
            raise RunError(f"the engine at {columns.url} {what}; checkpoint.resume=auto continues from the last checkpoint")
        return read_generation(answer, columns.prompt_tokens, routing, records_kept, True)

    return [read(columns) for columns in columns_B]


@functools.cache
def _connect() -> httpx.Client:
    """Return this process's client. Making one costs 50 ms."""
    return httpx.Client(limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS), trust_env=False)


def _ask(url: str, key: str, handles: list[str], timeout: float) -> list[Answer | None]:
    hold(key)
    for attempt in range(_TRIES):
        try:
            response = _connect().post(f"{url}{FETCH}", json=handles, headers={"Authorization": f"Bearer {key}"}, timeout=timeout)
            response.raise_for_status()
            return read_answers(response.content)
        except (httpx.HTTPError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        time.sleep(_WAIT_SECONDS * (attempt + 1 < _TRIES))
    raise EngineLostError(f"the engine at {url} does not give the tokens of {len(handles)} completions ({reason})")
