"""Columns that stay at real engines: a replica fetches what the engine would have answered, and a run that loses an
engine with columns has the numbers of one that does not."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support import train_command, trainer_engine
from support.models import random_sequences
from support.trainer_engine import current

from megatron_rl.types import SamplingParams, group_by_engine
from rollout_sglang.remote_columns import fetch_columns

pytestmark = pytest.mark.xdist_group("unified")  # they share an engine

CHANGES = {
    "train.layout.dp": 2,
    "train.steps": 4,
    "reward.function": "math",
    "reward.max_error_share": 1.0,
    "rollout.sglang": '{log_level = "info"}',
    "log.samples": 8,
}
LEARNING = {
    "warm_start.batch_size": 16,
    "warm_start.steps": 80,  # so that some answers earn something, and the weights move
    "rollout.group_size": 4,
    "data.settings.levels": "[1]",
}
TWO_ENGINES = {"rollout.engines": 2, "reward.function": "examples.arithmetic.reward:reward"}  # the engines run the user's own function
PROMPTS = [sample.prompt_ids for sample in random_sequences(6, seed=17)]


def leave_and_fetch(tokens):
    """Return the completions of all prompts as the engines answer them, as they tell of them, and as a replica fetches them; and how many
    of their columns are kept at once, after the next version's first answer, and of its own."""
    engines, prompts = current().engines, [prompt.numpy() for prompt in PROMPTS]
    ways = [[SamplingParams(1.0, tokens, seed, columns=place) for seed in range(len(prompts))] for place in ("here", "but_text", "remote")]
    here, but_text, remote = (engines.generate(prompts, way) for way in ways)
    columns = [generation.remote for generation in remote]
    fetched = fetch_columns(columns, False, None, 60.0)
    kept = [len(engines.find_columns(group_by_engine(columns)))]
    trainer_engine.sync(1)
    newer = [generation.remote for generation in engines.generate(prompts[:1], ways[2][:1])]
    kept += [len(engines.find_columns(group_by_engine(columns))), len(engines.find_columns(group_by_engine(newer)))]
    trainer_engine.sync(0)
    return here, but_text, remote, fetched, kept


@pytest.mark.default_cases(1)
def test_a_replica_fetches_what_the_engine_would_have_answered(unified):
    here, but_text, remote, fetched, kept = unified.call(leave_and_fetch, 20)[0]
    assert kept == [len(PROMPTS), 0, 1]
    for prompt, whole, told, left, found in zip(PROMPTS, here, but_text, remote, fetched, strict=True):
        assert whole.remote is None and found.remote is None and told.remote.digest == left.remote.digest
        assert whole.output_ids_T.tobytes() == found.output_ids_T.tobytes() and not len(left.output_ids_T) + len(told.output_ids_T)
        assert found.prompt_ids_T.tolist() == prompt.tolist() and left.remote.prompt_tokens == len(prompt)
        assert whole.logprobs_T.tobytes() == found.logprobs_T.tobytes() and left.remote.tokens == len(whole.output_ids_T)
        assert whole.text == told.text and left.text == "" and left.remote.has_text and whole.finish_reason == left.finish_reason
        assert left.remote.logprob_sum == float(whole.logprobs_T.sum())


def run_and_kill(folder, changes, kills=True):
    """Return the folder of a run of two replicas that loses an engine after the first step, when it keeps columns of the next one."""
    with train_command.train(folder, CHANGES | changes, launcher=train_command.TORCHRUN) as command:
        if kills:
            train_command.wait_for_rows(command, folder, 2)
            train_command.kill_engine(command, most=1)
        done = command.wait(train_command.LONG)
    assert done.code == 0, done.err
    run = train_command.latest(folder)
    assert ("is lost" in (run / "run.log").read_text()) == kills
    log = "".join(file.read_text() for file in run.glob("engine*.log"))
    assert log.count("POST /megatron_rl/columns") >= 2 * 4 - 2 * kills
    assert log.count("POST /megatron_rl/score") >= 4 and log.count("POST /megatron_rl/texts") >= 4 - kills
    return run


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("changes", [{}, TWO_ENGINES], ids=["one engine", "two engines"])
def test_a_run_whose_engine_is_lost_with_columns_has_the_rows_of_one_that_nothing_happened_to(tmp_path, changes):
    straight, killed = (run_and_kill(tmp_path / name, LEARNING | changes, name == "killed") for name in ("straight", "killed"))
    rows, samples = train_command.read_numbers(straight), train_command.read_rows(straight, "samples.jsonl")
    assert rows == train_command.read_numbers(killed)
    assert samples == train_command.read_rows(killed, "samples.jsonl") and len(samples) == 4 * 8
    assert sum(row["reward/std"] > 0 for row in rows[1:]) >= 2
    assert [row["mismatch/abs_max"] for row in rows[1:]] == [0.0] * 4, "replicas have the tokens and log-probs of the engine"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_that_samples_ahead_goes_on_with_tokens_that_are_not_too_old(tmp_path):
    """Lost groups are sampled again by the newest weights, so the rows are others."""
    ahead = {"placement.kind": "disaggregated", "placement.max_staleness": 1, "algorithm.correction": "tis"}
    rows = train_command.read_rows(run_and_kill(tmp_path, ahead))[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and sum(row["engine/restarts"] for row in rows) == 1
    assert all(row["staleness/max"] <= 1 and row["mismatch/tokens"] > 0 for row in rows)
    assert {row.get("mismatch/abs_max", 0.0) for row in rows} == {0.0}, "a step without this has asked the canary"


class RewardServer(BaseHTTPRequestHandler):
    """Rewards every completion with the number of its characters."""

    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["texts"]
        content = json.dumps({"rewards": [float(len(text)) for text in texts]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_texts_of_a_run_with_a_reward_server_pass_rank_0(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), RewardServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    functions = f'[{{name = "http", url = "http://127.0.0.1:{server.server_port}/"}}]'
    changes = {name: value for name, value in CHANGES.items() if name != "reward.function"} | {"reward.function": "", "train.steps": 2}
    with train_command.train(tmp_path, changes | {"reward.functions": functions}, launcher=train_command.TORCHRUN) as command:
        done = command.wait(train_command.LONG)
    server.shutdown()
    assert done.code == 0, done.err
    log = (run := train_command.latest(tmp_path)).joinpath("engine.log").read_text()
    assert log.count("POST /megatron_rl/columns") >= 2 * 2 and "POST /megatron_rl/score" not in log
    samples = train_command.read_rows(run, "samples.jsonl")
    assert samples and all(row["reward"] == len(row["completion"]) > 0 for row in samples)
