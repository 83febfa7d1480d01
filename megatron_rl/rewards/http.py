"""Rewards from a user's HTTP server. docs/guides/rewards.md describes the protocol, with an example server.

    POST url   {"texts": [...], "problems": [{"id", "prompt", "answer", "level", "source", "columns"}, ...]}
    200        {"rewards": [number or null, ...], "correct": [true, ...]}       `correct` is optional: by default a reward above 0

The deadline applies to a whole request, so a server that sends a byte now and then delays nobody.
"""

import asyncio
import json
import math
import os
import threading
from collections.abc import Sequence

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from megatron_rl.config.reward import RewardFunctionConfig
from megatron_rl.errors import UserError
from megatron_rl.redaction import hold
from megatron_rl.types import Problem, Reward
from megatron_rl.workers.proxies import uses_proxy

_MOST_REQUESTS = 8  # maximum number of concurrent requests
_RETRYABLE_STATUS = {429, 502, 503, 504}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
"""Seconds before the first retry. Each further pause is twice as long."""


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)

    rewards: list[float | None]
    correct: list[bool] | None = None


class HttpRewardClient:
    """Client of one server. Raise UserError if its token is missing, or if the environment names a proxy that cannot be used."""

    def __init__(self, part: RewardFunctionConfig) -> None:
        self._part, self._tls = part, httpx.create_ssl_context()  # loading certificates takes 0.1 s
        self._calls = threading.Semaphore(_MOST_REQUESTS)  # limits threads, which mostly send one request each
        self._headers = {"Content-Type": "application/json"}
        if part.token_env:
            token = os.environ.get(part.token_env, "").strip()
            if not (token.isascii() and token.isprintable() and token):
                rule = "this environment variable must hold the server's bearer token, in printable ASCII"
                raise UserError("reward.functions.token_env", part.token_env, rule, f"export {part.token_env}=...")
            hold(token)
            self._headers["Authorization"] = f"Bearer {token}"
        try:
            self._client()
        except (ImportError, ValueError) as error:
            rule, fix = f"the environment's proxy cannot be used ({error})", "correct HTTPS_PROXY, HTTP_PROXY or ALL_PROXY, or set NO_PROXY"
            raise UserError("reward.functions.url", part.url, rule, fix) from None

    def score(self, texts_B: Sequence[str], problems_B: Sequence[Problem]) -> list[Reward]:
        """Return one reward per completion, in order. It has an error if the server gave none. Thread-safe; call it outside of any event
        loop."""
        with self._calls:
            return asyncio.run(self._score(texts_B, problems_B))

    async def _score(self, texts_B: Sequence[str], problems_B: Sequence[Problem]) -> list[Reward]:
        size, slots = self._part.batch_size, asyncio.Semaphore(_MOST_REQUESTS)
        async with self._client() as client:
            starts = range(0, len(texts_B), size)
            batches = [self._batch(client, slots, texts_B[at : at + size], problems_B[at : at + size]) for at in starts]
            return [reward for rewards in await asyncio.gather(*batches) for reward in rewards]

    async def _batch(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, texts: Sequence[str], problems: Sequence[Problem]
    ) -> list[Reward]:
        pause, retries_left = _FIRST_PAUSE, self._part.retries
        while True:
            try:
                async with slots:
                    return await self._attempt(client, texts, problems)
            except _RequestError as error:
                if not retries_left or not error.retryable:
                    return [Reward(0.0, False, error=str(error))] * len(texts)
            await asyncio.sleep(pause)
            pause, retries_left = min(2 * pause, _LONGEST_PAUSE), retries_left - 1

    async def _attempt(self, client: httpx.AsyncClient, texts: Sequence[str], problems: Sequence[Problem]) -> list[Reward]:
        body = json.dumps({"texts": list(texts), "problems": [problem.to_json() for problem in problems]})  # ASCII passes lone surrogates
        try:
            async with asyncio.timeout(self._part.timeout):
                response = await client.post(self._part.url, content=body)
        except TimeoutError:
            raise _RequestError(f"timeout after {self._part.timeout:g} s", retryable=True) from None
        except httpx.HTTPError as error:
            raise _RequestError(f"{type(error).__name__}: {error}", retryable=True) from None
        if response.status_code != httpx.codes.OK:
            body = " ".join(response.text.split())[:200]
            raise _RequestError(f"HTTP status {response.status_code}: {body}", retryable=response.status_code in _RETRYABLE_STATUS)
        return _parse_rewards(response.content, len(texts))

    def _client(self) -> httpx.AsyncClient:
        # `_attempt` sets the deadline
        return httpx.AsyncClient(headers=self._headers, verify=self._tls, timeout=None, trust_env=uses_proxy(self._part.url))


class _RequestError(Exception):
    """A request without a usable answer. `retryable`: whether another attempt may help."""

    def __init__(self, reason: str, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable


def _parse_rewards(content: bytes, count: int) -> list[Reward]:
    try:
        answer = _Answer.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"])) or "answer"
        raise _RequestError(f"unusable answer: {location}: {first['msg']}", retryable=False) from None
    correct = answer.correct if answer.correct is not None else [value is not None and value > 0 for value in answer.rewards]
    for name, values in (("rewards", answer.rewards), ("correct", correct)):
        if len(values) != count:
            raise _RequestError(f"unusable answer: {len(values)} {name} for {count} completions", retryable=False)
    return [_to_reward(value, is_correct) for value, is_correct in zip(answer.rewards, correct, strict=True)]


def _to_reward(value: float | None, correct: bool) -> Reward:
    if value is None or not math.isfinite(value):
        return Reward(0.0, False, error=f"the server gave the reward {'null' if value is None else value}")
    return Reward(value, correct)
