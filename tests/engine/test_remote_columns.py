"""Columns that stay at real engines: a replica fetches what the engine would have answered, and a run goes on without a lost engine's."""

import pytest
from support import train_command, trainer_engine
from support.models import random_sequences
from support.trainer_engine import current

from megatron_rl.types import SamplingParams
from rollout_sglang.remote_columns import fetch_columns

PROMPTS = [sample.prompt_ids for sample in random_sequences(6, seed=17)]


def leave_and_fetch(tokens):
    """Return the completions of all prompts as the engines answer them, as they tell of them, and as a replica fetches them; and how many
    of their columns are kept at once, after the next version's first answer, and of its own."""
    engines, prompts = current().engines, [prompt.numpy() for prompt in PROMPTS]
    ways = [[SamplingParams(1.0, tokens, seed, columns=place) for seed in range(len(prompts))] for place in ("here", "but_ids", "remote")]
    here, but_ids, remote = (engines.generate(prompts, way) for way in ways)
    columns = [generation.remote for generation in remote]
    fetched = fetch_columns(columns, [len(prompt) for prompt in prompts], False, None, 60.0)
    kept = [len(engines.find_columns(columns))]
    trainer_engine.sync(1)
    newer = [generation.remote for generation in engines.generate(prompts[:1], ways[2][:1])]
    kept += [len(engines.find_columns(columns)), len(engines.find_columns(newer))]
    trainer_engine.sync(0)
    return here, but_ids, remote, fetched, kept


def test_a_replica_fetches_what_the_engine_would_have_answered(unified):
    here, but_ids, remote, fetched, kept = unified.call(leave_and_fetch, 20)[0]
    assert kept == [len(PROMPTS), 0, 1]
    for whole, ids, left, found in zip(here, but_ids, remote, fetched, strict=True):
        assert whole.remote is None and found.remote is None and ids.remote.digest == left.remote.digest
        assert whole.output_ids_T.tobytes() == found.output_ids_T.tobytes() == ids.output_ids_T.tobytes() != left.output_ids_T.tobytes()
        assert whole.logprobs_T.tobytes() == found.logprobs_T.tobytes() and left.remote.tokens == len(whole.output_ids_T)
        assert whole.text == left.text == ids.text and whole.finish_reason == left.finish_reason
        assert left.remote.logprob_sum == float(whole.logprobs_T.sum())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_with_replicas_goes_on_if_its_engine_is_lost_with_columns(tmp_path):
    changes = {
        "train.layout.dp": 2,
        "train.steps": 4,
        "placement.kind": "disaggregated",
        "placement.max_staleness": 1,
        "algorithm.correction": "tis",
        "reward.function": "math",
        "reward.max_error_share": 1.0,
        "rollout.sglang": '{log_level = "info"}',
    }
    with train_command.train(tmp_path, changes, launcher=train_command.TORCHRUN) as command:
        train_command.wait_for_rows(command, tmp_path, 2)
        train_command.kill_engine(command)
        done = command.wait(train_command.LONG)
    assert done.code == 0, done.err
    run = train_command.latest(tmp_path)
    assert (run / "engine.log").read_text().count("POST /megatron_rl/columns") >= 6 and "is lost" in (run / "run.log").read_text()
    mismatches = [row["mismatch/abs_max"] for row in train_command.read_rows(run)[1:]]
    assert mismatches == [0.0] * 4, "replicas have the tokens and log-probs of the engine"
