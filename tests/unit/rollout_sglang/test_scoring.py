"""Rewards that the engine's server computes: they are those of rank 0's scorer, and what goes wrong has one line."""

import json
import threading
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from support.processes import free_port, until

from megatron_rl.config import Config
from megatron_rl.config.reward import RewardConfig, RewardFunctionConfig
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.types import Problem
from megatron_rl.workers import plain
from rollout_sglang import remote_columns, scoring
from rollout_sglang.answers import Answer
from rollout_sglang.remote_columns import ColumnStore

PROBLEM = Problem("p", "3+4=", "7", columns={"data_source": "sums"})
TEXTS = ["<think>three and four</think>7", "8", "<think>it never", "7"]


@pytest.fixture
def store(monkeypatch):
    """An empty store, for both modules."""
    store = ColumnStore()
    for module in (remote_columns, scoring):
        monkeypatch.setattr(module, "store", store)
    return store


def leave(store, texts):
    """Return the handles of completions with these texts."""
    handles = []
    for number, text in enumerate(texts):
        ids = bytearray(np.arange(number + 2, dtype=np.int32))
        answer = Answer("stop", "1", [], 0, ids, bytearray(np.zeros(number + 2, np.float32)), text=text)
        handles.append(store.leave([1], answer, "remote", 0).remains.handle)
    return handles


@contextmanager
def serving(config):
    """Context manager with a client of a server that scores."""
    app, port = Starlette(), free_port()
    with Scorer(config, print) as scorer:
        scoring.add_routes(app, scorer)
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        until(lambda: server.started, 60, "the server")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
        server.should_exit = True
        thread.join()


OTHER = Problem("q", "4+4=", "8")


def ask(client, handles, of_other=()):
    return client.post(scoring.SCORE, content=plain.dump([(handles, PROBLEM), (of_other, OTHER)]))


def test_the_verdicts_are_those_of_rank_0(store):
    length = RewardFunctionConfig(name="length", full_tokens=3, zero_tokens=6)
    config = RewardConfig(functions=(RewardFunctionConfig(name="math"), length), workers=1)
    with Scorer(config, print) as scorer:
        expected = scorer.score(TEXTS, [PROBLEM] * 4, [2, 3, 4, 5])
    handles = leave(store, TEXTS)
    with serving(config) as client:
        scored = scoring.SCORED.validate_python(ask(client, handles).json())
        texts = client.post(scoring.TEXTS, json=handles[::-1]).json()
        of_both = scoring.SCORED.validate_python(ask(client, handles[:2], handles[:2]).json())
    assert [each.reward.correct for each in of_both] == [True, False, False, True], "a request may have several problems"
    assert [each.reward for each in scored] == expected and [reward.correct for reward in expected] == [True, False, False, True]
    assert [each.unfinished for each in scored] == [False, False, True, False]
    assert [each.thought_share for each in scored] == [14 / 30, 0.0, 8 / 15, 0.0]
    assert texts[3] == [TEXTS[0], "7", "three and four"] and texts[1] == [TEXTS[2], None, "it never"]


def write_function(folder, monkeypatch, name, body):
    """Write a module with a reward function of the completion's token ids, in the form of TRL."""
    (folder / f"{name}.py").write_text(f"import time\n\n\ndef reward(completions, completion_ids, **_):\n    {body}\n")
    monkeypatch.chdir(folder)


def test_own_functions_get_token_ids_and_votes_have_answers(store, tmp_path, monkeypatch):
    write_function(tmp_path, monkeypatch, "own_ids", "return [float(sum(ids)) for ids in completion_ids]")
    with serving(RewardConfig(function="own_ids:reward", workers=1)) as client:
        scored = scoring.SCORED.validate_python(ask(client, leave(store, ["the answer is 12", "none"])).json())
    assert [(each.reward.value, each.reward.answer) for each in scored] == [(1.0, "12"), (3.0, "")], "sums of the ids"


def test_a_client_asks_again_until_busy_workers_have_answered(store, tmp_path, monkeypatch):
    write_function(tmp_path, monkeypatch, "slow_ids", "time.sleep(1); open('calls', 'a').write('x'); return [1.0] * len(completions)")
    monkeypatch.setattr(scoring, "_ANSWER_SECONDS", 0.01)
    with serving(RewardConfig(function="slow_ids:reward", workers=1)) as client:
        handles = leave(store, ["a"])
        answers = [ask(client, handles)]
        while answers[-1].status_code == httpx.codes.ACCEPTED:
            answers.append(ask(client, handles))
    assert len(answers) > 1 and [each["reward"]["value"] for each in answers[-1].json()] == [1.0]
    assert (tmp_path / "calls").read_text() == "x"


def test_what_goes_wrong_is_said_in_one_line(store):
    with serving(RewardConfig(function="no_such_module:reward", workers=1)) as client:
        refused = [ask(client, ["gone"]), ask(client, leave(store, ["7"]))]
    assert [each.status_code for each in refused] == [500, 500]
    assert refused[0].text == "the engine no longer has 1 completions" and "no_such_module" in refused[1].text


def test_only_engines_of_a_run_that_leaves_texts_there_score(monkeypatch, tmp_path):
    settings = {"model": {"path": "m"}, "train": {"layout": {"dp": 2}}, "rollout": {"engines": 4}, "reward": {"workers": 6, "timeout": 2}}
    environment = scoring.make_environment(Config.model_validate_json(json.dumps(settings)))
    assert json.loads(environment[scoring.VARIABLE])["workers"] == 2
    settings["train"] = {"layout": {"tp": 2}}
    assert scoring.make_environment(Config.model_validate_json(json.dumps(settings))) == {}
    monkeypatch.delenv(scoring.VARIABLE, raising=False)
    scoring.start(app := Starlette(), tmp_path, True)
    monkeypatch.setenv(scoring.VARIABLE, environment[scoring.VARIABLE])
    scoring.start(app, tmp_path, False)
    assert app.routes == []
