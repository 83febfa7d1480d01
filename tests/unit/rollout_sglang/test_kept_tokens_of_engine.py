"""What SGLang tells of the tokens that each was drawn from."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.errors import RunError
from megatron_rl.types import Generation
from rollout_sglang.answers import read_kept_tokens


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
