"""The shipped configurations of dense models, with their engines, run without GPUs and take the planned memory."""

from __future__ import annotations

import pytest
from support.shipped import check_aims, rehearse_shipped


@pytest.mark.parametrize(("name", "stages"), [("qwen3_8b", [0]), pytest.param("qwen2_5_32b", [0], marks=pytest.mark.long)])
def test_ranks_run_and_wait_for_nothing_within_micro_batches(name, stages, tmp_path):
    found = rehearse_shipped(name, tmp_path)
    assert [rank["stage"] for rank in found["trainer"]] == stages and len(found["engine"]) == 2
    for rank in found["trainer"]:
        for phase in rank["phases"]:
            assert not sum(wait["in_micro_batches"] for wait in phase["host_waits"]), phase["phase"]
        check_aims(rank)
