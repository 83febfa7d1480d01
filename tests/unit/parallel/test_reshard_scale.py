"""The plan of a big model: Qwen3-235B-A22B from 128 trainer ranks to eight engines of 8 ranks, in seconds."""

from __future__ import annotations

import time
from collections import Counter

from support.geometries import published_model
from support.golden.slow_cut import as_fp8

from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.reshard import add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards


def test_planning_qwen3_235b_from_128_to_64_ranks_takes_seconds():
    model, train = published_model("Qwen3-235B-A22B"), Layout(tp=4, pp=2, ep=16, etp=1, dp=16)
    assert train.world_size == 128
    start = time.process_time()
    plan = reshard(build_trainer_shards(model, train), build_engine_shards(model, tp=8, ep=8, engines=8), as_fp8, homes={})
    transfers = add_scale_transfers(plan)
    seconds = time.process_time() - start
    print(f"{len(plan)} copies, {len(transfers)} moves in {seconds:.1f} s")
    assert seconds < 30  # of one core; 4 on an idle machine

    arrived, sent = Counter(), Counter()
    for copy in plan:
        size = copy.target_rect.rows * copy.target_rect.cols
        arrived[copy.target_rank] += size
        sent[copy.source_rank] += size * copy.format.element_bytes
    wanted = build_engine_shards(model, tp=8, ep=8)
    for rank in range(64):
        assert arrived[rank] == sum(p.tensor_rect.rows * p.tensor_rect.cols for shard in wanted[rank % 8] for p in shard.regions)
    assert len(sent) == 128 and max(sent.values()) < 1.02 * min(sent.values())
