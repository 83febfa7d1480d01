"""Columns that stay at real engines: a replica fetches what the engine would have answered, and a run that loses an engine with columns has
the numbers of one that does not."""

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
def test_a_run_whose_engine_is_lost_with_columns_samples_them_again(tmp_path):
    changes = {
        "train.layout.dp": 2,
        "train.steps": 4,
        "placement.kind": "disaggregated",
        "placement.max_staleness": 1,
        "algorithm.correction": "tis",
        "reward.function": "math",
        "reward.max_error_share": 1.0,
        "rollout.sglang": '{log_level = "info"}',
        "log.samples": 8,
    }
    runs = []
    for kills in (False, True):
        with train_command.train(tmp_path / str(kills), changes, launcher=train_command.TORCHRUN) as command:
            if kills:
                train_command.wait_for_rows(command, tmp_path / str(kills), 2)
                train_command.kill_engine(command)
            done = command.wait(train_command.LONG)
        assert done.code == 0, done.err
        run = train_command.latest(tmp_path / str(kills))
        assert (run / "engine.log").read_text().count("POST /megatron_rl/columns") >= 2 * 4 - 2 * kills
        assert all(row["mismatch/abs_max"] == 0.0 for row in train_command.read_rows(run) if "mismatch/abs_max" in row)
        runs.append((train_command.read_numbers(run), train_command.read_rows(run, "samples.jsonl")))
    assert "is lost" in (run / "run.log").read_text()
    assert runs[0] == runs[1]
