"""Kept tokens and policy versions in SGLang's answers."""

import numpy as np
import pytest

from megatron_rl.errors import RunError
from megatron_rl.types import Generation
from rollout_sglang.engine import parse_generation, read_kept_tokens


def answer(masks: list[list[int]]) -> dict:
    return {"meta_info": {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": [-0.5, 0.0]}}


def test_an_answers_kept_tokens_come_with_the_log_probs_over_them():
    generation = Generation(np.array([7, 3]), np.array([-2.0, -1.0]), "stop", 1)
    read_kept_tokens(answer([[9, 7], [3]]), generation)
    assert generation.kept_tokens.counts.tolist() == [2, 1] and generation.kept_tokens.ids.tolist() == [9, 7, 3]
    assert generation.logprobs_T.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("masks", [[[9, 7]], [[9, 8], [3]], [[7, 7, 9], []], []])
def test_a_token_that_was_not_kept_ends_the_run(masks):
    with pytest.raises(RunError, match="does not report which tokens"):
        read_kept_tokens(answer(masks), Generation(np.array([7, 3]), np.array([-2.0, -1.0]), "stop", 1))


def response(spans: list[tuple[str, int, int]], tokens: int) -> dict:
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    meta = {"weight_versions": versions, "weight_version": spans[-1][0], "cached_tokens": 0, "finish_reason": {"type": "stop"}}
    return {"meta_info": meta | {"output_token_logprobs": [[-0.5, 10 + number, None] for number in range(tokens)]}}


def test_the_engine_tells_every_tokens_version():
    assert parse_generation(response([("3", 0, 4)], 4), True).versions_T is None
    results = parse_generation(response([("3", 0, 1), ("4", 1, 4)], 4), True)
    assert (results.versions_T.tolist(), results.policy_version, results.output_ids_T.tolist()) == ([3, 4, 4, 4], 4, [10, 11, 12, 13])
    with pytest.raises(RunError, match="policy versions of 3 tokens for a completion of 4"):
        parse_generation(response([("3", 0, 1), ("4", 1, 3)], 4), True)
    with pytest.raises(RunError, match="one completion was sampled by policy versions 3, 4"):
        parse_generation(response([("3", 0, 1), ("4", 1, 4)], 4), False)
