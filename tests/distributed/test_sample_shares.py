"""Replicas train only on their own samples, and samples, metrics and weights are those of one process."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
from megatron.core import parallel_state
from support import training_runs
from support.models import FP32
from support.samples import assert_equal_samples, make_samples
from support.trainer import start

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.distributed import is_rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.passes import replicas
from megatron_rl.types import RemoteColumns
from parallel.layout import Layout

ALL = ("mask", "experts", "kept", "lags")


def scatter(samples, layout):
    """Return this rank's share of samples that rank 0 has, sent in small pieces."""
    start(layout)
    with mock.patch.object(replicas, "PIECE_BYTES", 1000 if len(samples) > 1 else 64):
        own = replicas.share_out(samples if is_rank0() else [])
    return copy.deepcopy(own)  # a tensor that goes to another process leaves its memory, where NumPy still looks for kept tokens


@pytest.mark.parametrize("count, layout", [(7, Layout(tp=2, dp=2)), (7, Layout(pp=2, dp=2)), (1, Layout(dp=2))])
def test_ranks_of_a_replica_have_its_samples_and_no_others(worlds, count, layout):
    """Also if a replica has none."""
    samples = make_samples([(1 + number % 4, 3 * number % 11 + 4 * (count == 1)) for number in range(count)], ALL)
    results = worlds(layout.world_size).call(scatter, samples, layout)
    numbers = [[sample.number for sample in result] for result in results]
    shares = sorted({tuple(share) for share in numbers})
    assert len(shares) == 2 and sorted(sum(shares, ())) == list(range(count)) and numbers.count(list(shares[0])) * 2 == layout.world_size
    for result, share in zip(results, numbers, strict=True):
        assert_equal_samples(result, [samples[number] for number in share])


def scatter_remote(samples, layout, broken):
    """Like `scatter` of samples whose columns engines keep. `broken`: number of a sample that is lost."""
    start(layout)

    def fetch(own):
        assert parallel_state.get_pipeline_model_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 0
        if any(each.number == broken for each in own):
            raise RunError(f"sample {broken} is lost")
        assert [each.length for each in own] == [samples[each.number].length for each in own]
        return [replace(samples[each.number], advantage=each.advantage) for each in own]

    remotes = [
        RemoteColumns("http://engine", "key", str(each.number), each.sampled_count, "", -1.0, (3, 4), 5, len(each.prompt_ids))
        for each in samples
    ]
    sent = [
        TrainingSample([], [], sample.advantage, number=sample.number, remote=remote)
        for sample, remote in zip(samples, remotes, strict=True)
    ]
    try:
        with mock.patch.object(replicas, "PIECE_BYTES", 1000):
            return copy.deepcopy(replicas.share_out(sent if is_rank0() else [], fetch=fetch))
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("count, layout", [(7, Layout(tp=2, dp=2)), (7, Layout(pp=2, dp=2)), (1, Layout(tp=2, dp=2))])
def test_the_first_rank_of_a_replica_fetches_columns_for_all_of_its_ranks(worlds, count, layout):
    samples = make_samples([(1 + number % 4, 3 * number % 11 + 4) for number in range(count)], ("experts", "kept", "lags"))
    results = worlds(layout.world_size).call(scatter_remote, samples, layout, None)
    numbers = [[sample.number for sample in result] for result in results]
    shares = sorted({tuple(share) for share in numbers})
    assert len(shares) == 2 and sorted(sum(shares, ())) == list(range(count)) and numbers.count(list(shares[0])) * 2 == layout.world_size
    for result, share in zip(results, numbers, strict=True):
        assert_equal_samples(result, [samples[number] for number in share])
    assert worlds(layout.world_size).call(scatter_remote, samples, layout, count - 1) == [f"sample {count - 1} is lost"] * 4


@pytest.mark.parametrize("algorithm", [{}, {"name": "rloo", "updates_per_step": 1, "calibrate_every": 0}], ids=["grpo", "rloo"])
def test_the_loop_with_replicas_is_that_of_one_process(worlds, checkpoint, tmp_path, algorithm):
    """Corrections, calibrated clipping, the mismatch, and rloo's advantages with a KL term in the reward need all replicas' log-probs."""

    def train(layout):
        arguments = checkpoint, tmp_path / f"run{layout.world_size}", 2, FP32, False, layout, "", algorithm
        ranks = worlds(layout.world_size).call(training_runs.train_to, *arguments)
        keep = ("time/", "memory/", "tokens/padding", "precision/")
        return [{name: value for name, value in row.items() if not name.startswith(keep)} for row in ranks[0]["rows"]], ranks[0]["samples"]

    (rows, samples), (expected_rows, expected_samples) = train(Layout(pp=2, dp=2)), train(Layout())
    first = {"correction/max_positive", "mismatch/abs_max", "update/abs_mean", "mismatch/position/0/tokens"}
    assert first <= rows[1].keys() and ("reward/kl" in rows[1]) == bool(algorithm)
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert len(samples) == len(expected_samples) > 0
    for sample, expected in zip(samples, expected_samples, strict=True):
        assert sample["advantage"] == pytest.approx(expected["advantage"], abs=1e-5)
        for (count, mean), (expected_count, expected_mean) in zip(sample["mismatch"], expected["mismatch"], strict=True):
            assert (count, mean) == (expected_count, pytest.approx(expected_mean, rel=1e-4))
