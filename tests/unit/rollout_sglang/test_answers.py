"""Completions in SGLang's answers: packed by the engine's server, and read by the client."""

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.errors import RunError
from megatron_rl.types import Generation
from rollout_sglang.answering import answer_in_columns
from rollout_sglang.answers import MEDIA_TYPE, Answer, pack_answers, parse_generation, read_answers, read_kept_tokens


def response(spans: list[tuple[str, int, int]], tokens: int, **more: Any) -> dict:
    """Return SGLang's answer to one prompt."""
    versions = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    meta = {"weight_versions": versions, "weight_version": spans[-1][0], "cached_tokens": 3, "finish_reason": {"type": "stop"}}
    return {"meta_info": meta | {"output_token_logprobs": [(-0.5 - number, 10 + number, None) for number in range(tokens)]} | more}


def pass_on(*responses: dict) -> list[Answer]:
    return read_answers(pack_answers(responses))


def with_masks(masks: list[list[int]], **more: Any) -> Answer:
    return pass_on(response([("1", 0, 2)], 2, output_token_sampling_mask=masks, output_token_sampling_logprobs=[-0.5, 0.0], **more))[0]


def test_an_answers_kept_tokens_come_with_the_log_probs_over_them():
    generation = Generation(np.array([7, 3]), np.array([-2.0, -1.0]), "stop", 1)
    read_kept_tokens(with_masks([[9, 7], [3]]), generation)
    assert generation.kept_tokens.counts.tolist() == [2, 1] and generation.kept_tokens.ids.tolist() == [9, 7, 3]
    assert generation.logprobs_T.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("masks", [[[9, 7]], [[9, 8], [3]], [[7, 7, 9], []], []])
def test_a_token_that_was_not_kept_ends_the_run(masks):
    with pytest.raises(RunError, match="does not report which tokens"):
        read_kept_tokens(with_masks(masks), Generation(np.array([7, 3]), np.array([-2.0, -1.0]), "stop", 1))
    with pytest.raises(RunError, match="does not report which tokens"):
        read_kept_tokens(pass_on(response([("1", 0, 2)], 2))[0], Generation(np.array([7, 3]), np.array([-2.0, -1.0]), "stop", 1))


def test_the_engine_tells_every_tokens_version():
    assert parse_generation(pass_on(response([("3", 0, 4)], 4))[0], True).versions_T is None
    mixed, short = pass_on(response([("3", 0, 1), ("4", 1, 4)], 4), response([("3", 0, 1), ("4", 1, 3)], 4))
    results = parse_generation(mixed, True)
    assert (results.versions_T.tolist(), results.policy_version, results.output_ids_T.tolist()) == ([3, 4, 4, 4], 4, [10, 11, 12, 13])
    with pytest.raises(RunError, match="policy versions of 3 tokens for a completion of 4"):
        parse_generation(short, True)
    with pytest.raises(RunError, match="one completion was sampled by policy versions 3, 4"):
        parse_generation(mixed, False)


def test_columns_hold_what_json_held_bit_for_bit():
    source = np.random.default_rng(0)
    logprobs, ids = -source.exponential(5, 5000).astype(np.float32), source.integers(0, 1 << 31, 5000)
    entries = [(float(value), int(number), None) for value, number in zip(logprobs, ids, strict=True)]
    first, second = (response([("8", 0, 5000)], 0, output_token_logprobs=each) for each in (entries, entries[:1]))
    by_json = [entry for entry in json.loads(json.dumps(first))["meta_info"]["output_token_logprobs"]]
    generations = [parse_generation(answer, False) for answer in pass_on(first, second)]
    assert generations[0].logprobs_T.tobytes() == np.array([entry[0] for entry in by_json], np.float32).tobytes() == logprobs.tobytes()
    assert generations[0].output_ids_T.tolist() == [entry[1] for entry in by_json]
    assert [len(each.output_ids_T) for each in generations] == [5000, 1] and generations[1].cached_tokens == 3
    for values in (generations[0].output_ids_T, generations[0].logprobs_T):
        assert values.flags.writeable and values.flags.aligned, "torch shares this memory"
    assert len(pack_answers([first])) < 8 * 5000 + 200


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None])
def test_a_log_prob_that_is_no_number_ends_the_run(value):
    (answer,) = pass_on(response([("1", 0, 1)], 0, output_token_logprobs=[(value, 7, None)]))
    with pytest.raises(RunError, match="not a finite number"):
        parse_generation(answer, False)
    kept = {"output_token_sampling_mask": [[7]], "output_token_sampling_logprobs": [value]}
    (answer,) = pass_on(response([("1", 0, 1)], 1, **kept))
    with pytest.raises(RunError, match="not a finite number"):
        read_kept_tokens(answer, Generation(np.array([7]), np.array([-2.0]), "stop", 1))


def test_an_aborted_completion_needs_no_fields():
    partial = {"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [(-1.0, 7, None)]}}
    aborted, cut, whole = pass_on({"meta_info": {"finish_reason": {"type": "abort"}}}, partial, response([("2", 0, 1)], 1))
    assert (aborted.finish, aborted.ids, cut.finish, np.frombuffer(cut.ids, np.int32).tolist()) == ("abort", b"", "abort", [7])
    assert parse_generation(whole, False).policy_version == 2


_SPOILING = (lambda data: data[:-1], lambda data: data + b"\0", lambda _: b"", lambda data: data.replace(b"ids", b"idz", 1))


@pytest.mark.parametrize("spoil", _SPOILING)
def test_other_data_is_refused(spoil):
    with pytest.raises(ValueError, match=r"."):
        read_answers(spoil(pack_answers([response([("2", 0, 1)], 1)])))
    with pytest.raises(RunError, match="2 log-probs for a completion of 1 tokens"):
        parse_generation(msgspec.structs.replace(pass_on(response([("2", 0, 2)], 2))[0], ids=bytearray(4)), False)


@pytest.mark.parametrize(("accept", "stream"), [("*/*", False), (MEDIA_TYPE, True)])
def test_other_clients_get_sglangs_own_answer(accept, stream):
    async def serve(*arguments: Any) -> Any:
        return arguments

    asked, request = SimpleNamespace(stream=stream), SimpleNamespace(headers={"accept": accept})
    assert asyncio.run(answer_in_columns(serve, asked, request)) == (asked, request)
