"""Rewards of completions that stay at the engine with their texts: its server scores them with reward workers of its own, so that neither
texts nor tasks of workers pass rank 0."""

import asyncio
import atexit
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from pydantic import ConfigDict, TypeAdapter

from megatron_rl.config import Config
from megatron_rl.config.reward import RewardConfig
from megatron_rl.errors import RunError
from megatron_rl.rewards import math
from megatron_rl.rewards.foreign import Sample
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.columns import choose_place
from megatron_rl.types import Problem, Scored
from megatron_rl.workers import plain
from rollout_sglang.answers import IDS
from rollout_sglang.remote_columns import Kept, store
from rollout_sglang.texts import load

VARIABLE = "MEGATRON_RL_REWARD"  # environment variable with the `RewardConfig` of an engine that scores
SCORE, TEXTS = "/megatron_rl/score", "/megatron_rl/texts"
SCORED = TypeAdapter(list[Scored], config=ConfigDict(ser_json_inf_nan="constants"))
_ANSWER_SECONDS = 10.0  # after which a client is told to ask again, since nothing bounds how long it waits for busy workers
_THREADS = 64


def make_environment(config: Config) -> dict[str, str]:
    """Return environment variables of engines of a run. They share `reward.workers`, but each has at least one."""
    if choose_place(config) != "remote":
        return {}
    workers = -(-config.reward.workers // config.rollout.engines)
    return {VARIABLE: config.reward.model_copy(update={"workers": workers}).model_dump_json()}


def start(app: Any, model: Path, serves: bool) -> None:
    """If this engine scores, start its workers without waiting for them, and let a server that has not started yet take requests. `model`:
    folder of the tokenizer; `serves`: whether this is the engine's node with the server."""
    settings = os.environ.pop(VARIABLE, "")
    if settings and serves:
        scorer = Scorer(RewardConfig.model_validate_json(settings), print, load(model).chat_template)
        atexit.register(scorer.__exit__)
        add_routes(app, scorer.__enter__())


def add_routes(app: Any, scorer: Scorer) -> None:
    """Let a server that has not started yet score with `scorer`."""
    from starlette.responses import JSONResponse
    from starlette.responses import Response as Reply

    threads, running = ThreadPoolExecutor(_THREADS, thread_name_prefix="megatron-rl-score"), dict[bytes, asyncio.Future[bytes]]()

    async def score(request: Any) -> Any:
        task = await request.body()
        if task not in running:  # a client that asks again continues to wait
            running[task] = asyncio.get_running_loop().run_in_executor(threads, score_task, task, scorer)
        done, _ = await asyncio.wait([scoring := running[task]], timeout=_ANSWER_SECONDS)
        if not done:
            return Reply(status_code=httpx.codes.ACCEPTED)
        running.pop(task, None)
        try:
            return Reply(scoring.result(), media_type="application/json")
        except RunError as error:
            return Reply(str(error), httpx.codes.INTERNAL_SERVER_ERROR)

    async def read(request: Any) -> Any:
        kept_B = _get(await request.json())
        return JSONResponse([(kept.text, *(kept.response or Response("", ""))) for kept in kept_B])

    app.add_route(SCORE, score, methods=["POST"])
    app.add_route(TEXTS, read, methods=["POST"])


def score_task(task: bytes, scorer: Scorer) -> bytes:
    """Score completions in the store. `task`: pairs of handles and their problem. Return JSON of `SCORED`. Raise RunError if one was
    dropped, or if workers cannot be started."""
    pairs = [(handle, problem) for handles, problem in plain.load(task, [Problem]) for handle in handles]
    kept_B, problems_B = _get([handle for handle, _ in pairs]), [problem for _, problem in pairs]
    lengths_B = [len(kept.answer.ids) // IDS.itemsize for kept in kept_B]
    samples_B = [Sample(bytes(kept.answer.ids)) for kept in kept_B]
    rewards_B = scorer.judge([kept.text for kept in kept_B], problems_B, lengths_B, samples_B)
    scored_B = []
    for kept, problem, reward in zip(kept_B, problems_B, rewards_B, strict=True):
        kept.response = response = scorer.split(kept.text, problem)
        if reward.answer is None and not reward.error and response.answer is not None:
            reward.answer = math.final_answer(response.answer) or ""  # for votes
        scored_B.append(Scored(reward, response.compute_thought_share(kept.text), response.answer is None))
    return SCORED.dump_json(scored_B)


def _get(handles: Sequence[str]) -> list[Kept]:
    kept_B = [kept for kept in store.get(handles) if kept is not None]
    if len(kept_B) < len(handles):
        raise RunError(f"the engine no longer has {len(handles) - len(kept_B)} completions")
    return kept_B
