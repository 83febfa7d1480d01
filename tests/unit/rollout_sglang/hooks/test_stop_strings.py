"""Stop strings however they are spelled."""

from __future__ import annotations

from types import SimpleNamespace

from rollout_sglang.hooks.scheduling import count_tail_tokens


def test_the_tail_holds_a_stop_string_of_one_byte_tokens():
    request = SimpleNamespace(sampling_params=SimpleNamespace(stop_strs=["</a>", "é"]), output_ids=list(range(100)))
    assert count_tail_tokens(request, 1) == 5
    assert count_tail_tokens(request, 3) == 7
    request.output_ids = [1, 2]
    assert count_tail_tokens(request, 1) == 2
