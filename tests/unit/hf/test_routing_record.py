"""Routing records: shape, one-line refusals, joining of turns, and placement in micro-batches."""

import base64

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.families import ARCHITECTURES

from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape, extend_routing_record
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.training.samples import to_training_samples
from megatron_rl.types import Completion, Problem
from rollout_sglang.answers import Answer, pack_answers, read_answers, read_routed_experts

SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)


def record(tokens: int, seed: int = 0) -> np.ndarray:
    """Return two different experts for every token and layer, and zeros for the dense layer 0."""
    result = np.random.default_rng(seed).random((tokens - 1, 3, 8)).argsort(-1)[..., :2].astype(np.uint8)
    result[:, 0] = 0
    return result


def test_the_shape_is_the_models_and_another_turn_keeps_the_known_experts():
    assert RoutingShape.from_hf_config(ARCHITECTURES["qwen3_moe"]) == RoutingShape(4, (0, 2, 3), 4, 2)
    assert RoutingShape.from_hf_config(ARCHITECTURES["deepseek_v3"]) == RoutingShape(4, (1, 2, 3), 8, 4)
    assert RoutingShape(1, (0,), 256, 8).dtype is np.uint8 and RoutingShape(1, (0,), 257, 8).dtype is np.int16
    first, second = record(4, seed=1), record(9, seed=2)
    joined = extend_routing_record(extend_routing_record(None, first), second)
    assert (joined[:3] == first).all() and (joined[3:] == second[3:]).all() and len(joined) == 8
    assert extend_routing_record(None, None) is None


def _with(value: int) -> np.ndarray:
    wrong = record(5)
    wrong[2, 1, 0] = value
    return wrong


@pytest.mark.parametrize("wrong, line", [
    (None, "completion 1 of 1 comes without the routing of its tokens"),
    (record(4), r"shape \[3, 3, 2\] in uint8; its 5 tokens need \[4, 3, 2\] in uint8"),
    (record(5)[..., :1], r"shape \[4, 3, 1\]"),
    (record(5).astype(np.int16), "in int16; its 5 tokens need .* in uint8"),
    (_with(8), "names expert 8 of 8"),
    (_with(int(record(5)[2, 1, 1])), "sends a token to one expert twice"),
])  # fmt: skip
def test_an_invalid_record_is_refused_in_one_line(wrong, line):
    SHAPE.check(record(5), 5, "a record that fits")
    columns = np.array([1, 2, 3]), np.array([4, 5]), np.array([-1.0, -1.0])
    completion = Completion(Problem("1", "", ""), *columns, "stop", 0, "", routed_experts_T=wrong)

    def take() -> None:  # rank 0 checks first, then the sample's replica
        (sample,) = to_training_samples(RolloutBatch([completion]), routing=SHAPE)
        SHAPE.check(sample.routed_experts.numpy(), sample.length, "completion 1 of 1")

    with pytest.raises(RunError, match=line) as raised:
        take()
    assert "\n" not in str(raised.value)


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7)


@given(LENGTHS, st.integers(1, 30), st.integers(0, 2), st.integers(1, 4))
def test_every_token_finds_its_experts_in_its_micro_batch(lengths, most, more, multiple):
    samples = [
        TrainingSample([10 * index + 1] * prompt, [2] * response, routed_experts=torch.from_numpy(record(prompt + response, seed=index)))
        for index, (prompt, response) in enumerate(lengths)
    ]
    seen, numbers, padding = 0, [], torch.tensor([[0, 1]] * 3, dtype=torch.uint8)
    for batch in make_micro_batches(samples, most, multiple, agree=lambda count: count + more, padding_experts=padding):
        assert batch.routed_experts.shape == (1, batch.tokens.shape[1], 3, 2)
        assert batch.token_indices.shape == batch.tokens.shape
        assert (batch.token_indices >= 0).sum() == batch.tokens.shape[1] - batch.padding
        parts = batch.routed_experts[0].split(batch.lengths)
        for part, index in zip(parts, batch.sample_indices, strict=False):
            assert torch.equal(part, samples[index].routed_experts)
            seen += 1
        assert (batch.routed_experts[batch.token_indices < 0] == torch.tensor([0, 1])).all()
        numbers += batch.token_indices[batch.token_indices >= 0].tolist()
    assert seen == len(samples) and sorted(numbers) == list(range(sum(sequence.length - 1 for sequence in samples)))


def answer(values: np.ndarray | None) -> Answer:
    """Return what the client reads if SGLang reports these experts."""
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1", "cached_tokens": 0, "output_token_logprobs": []}
    routing = {} if values is None else {"routed_experts": base64.b64encode(values.astype(np.int32).tobytes()).decode()}
    return read_answers(pack_answers([{"meta_info": meta | routing}]))[0]


def test_the_engines_answers_are_read_and_checked():
    assert (read_routed_experts(answer(record(5)), SHAPE, 5) == record(5)).all()
    for response, line in (
        (answer(None), "without the requested routing"),
        (answer(record(6)), "routing of 5 tokens has 30 numbers, not 4 rows of 3 layers and 2 experts"),
        (answer(record(5).astype(int) + 256), "names experts 256 to 26\\d of 8"),  # a byte would hide it
        (answer(record(5).astype(int) - 256), "names experts -256 to -2[45]\\d of 8"),
        (answer(record(5).astype(int) + 65536), "names experts 65536 to 6554\\d of 8"),
    ):
        with pytest.raises(RunError, match=line):
            read_routed_experts(response, SHAPE, 5)
