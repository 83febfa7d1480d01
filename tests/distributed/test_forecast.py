"""Passes without gradient exchange tokens of experts in parts of expected sizes, and no bit changes: a pass with a part that is too small
is repeated."""

from unittest import mock

import pytest
import torch
from support import fake_gpu_libraries
from support.models import random_sequences
from support.samples import assert_same
from support.trainer import STILL, Trainer, own

from megatron_rl.batch.draws import mark_draws
from megatron_rl.kernels.experts.backends import make_grouped_backend
from megatron_rl.kernels.linear import make_backend
from megatron_rl.mcore.layers.moe import experts, forecast, token_counts
from megatron_rl.mcore.layers.moe.router import ModelRouters, RoutingReplay
from parallel.layout import Layout

EXPERTS = 8
DEEP_GEMM = {"mode": "fp8_unified", "backend": "deep_gemm", "reduction": "fast"}
TRAIN = STILL | {"micro_batch_tokens": 60}
TURNS = TRAIN | {"two_batch_overlap": "all"}
BATCH = random_sequences(9, seed=1)
PASSES = [False, False, True, True, False]
"""Whether all tokens of a pass go to the first two experts, which are on one rank."""
CASES = [(Layout(dp=2, ep=2), TRAIN, True), (Layout(tp=2, ep=2, etp=1), TURNS, False)]
LONG = [
    (Layout(dp=2, ep=2), TRAIN, False),
    (Layout(tp=2, dp=2, ep=4, etp=1), TURNS, False),
    (Layout(pp=2, dp=2, ep=2), TRAIN, False),
    (Layout(cp=2, dp=2, ep=4), TRAIN, False),
    (Layout(), TRAIN, False),
]


def score(folder, batch, train, layout, follows, alone=False):
    """Return what each of `PASSES` gives on this rank, and how often it counts tokens on the host. `alone`: one replica has all samples."""
    plain, results, favor = RoutingReplay.get_replay_topk, [], torch.zeros(EXPERTS)
    for cached in (make_backend, make_grouped_backend):
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        fake_gpu_libraries.install(patch)
        patch.setattr(token_counts, "counts_on_device", lambda: True)
        patch.setattr(forecast, "_MOST", 9)  # loads of the small micro-batches differ
        patch.setattr(experts, "start_count", counts := mock.Mock(side_effect=token_counts.start_count))
        patch.setattr(RoutingReplay, "get_replay_topk", lambda self, scores, *args: plain(self, scores + favor, *args))
        if not follows:
            patch.setattr(ModelRouters, "follow_forecast", lambda _, run: run())
        trainer = Trainer(folder, DEEP_GEMM, train, layout=layout)
        share = [] if alone and torch.distributed.get_rank() % 2 else batch if alone else own(batch)
        for number, favors in enumerate(PASSES):
            favor.copy_(torch.tensor([5.0, 4.0] + [0.0] * (EXPERTS - 2)) if favors else torch.zeros(EXPERTS))
            counts.reset_mock()
            mark_draws(share, number)
            with trainer.actor.routing.collect_stats(share, keep=number % 2 == 0) as stats, trainer.actor.record_draws() as draws:
                logprobs, entropy = trainer.actor.compute_logprobs(share)
            found = {"logprobs": logprobs, "entropy": entropy, "metrics": stats.gather_metrics(), "draws": [*draws.rows, draws.sums]}
            found["records"] = stats.gather_records() if number % 2 == 0 else []
            results.append((found, counts.call_count))
    for cached in (make_backend, make_grouped_backend):
        cached.cache_clear()
    return results


@pytest.mark.parametrize("layout, train, alone", [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_expected_parts_change_no_bit_and_are_repeated_if_too_small(worlds, model_folder, layout, train, alone):
    folder = model_folder("qwen3_moe", num_hidden_layers=2, num_experts=EXPERTS)
    run = worlds(layout.world_size).call
    for expected, counted in zip(*(run(score, folder, BATCH, train, layout, way, alone) for way in (True, False)), strict=True):
        for (ours, _), (theirs, _) in zip(expected, counted, strict=True):
            assert_same(ours, theirs)
            assert ours["metrics"]["router/dropped"] == 0
        (each,) = {waits for _, waits in counted}  # none in a stage without experts
        *waits, last = [0 if layout.ep == 1 else waits for waits in (each, 0, each, 0, each)]
        assert [found for _, found in expected[:-1]] == waits and expected[-1][1] in (0, last)  # an even load may fit into uneven parts
