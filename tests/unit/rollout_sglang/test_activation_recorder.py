"""What an engine rank records: the tokens of one sequence among others, and which derived tensors are stale."""

from types import SimpleNamespace

import pytest
import torch

from rollout_sglang.activation_recorder import RecordingRank
from rollout_sglang.derived_tensors import find_stale
from rollout_sglang.hooks import dequant_cache


class Norm(torch.nn.Module):
    def forward(self, hidden, residual):
        return hidden + residual, residual


def make_model():
    model = torch.nn.Module()
    model.config = SimpleNamespace(num_attention_heads=2, num_key_value_heads=2)
    model.model, model.logits_processor = torch.nn.Module(), torch.nn.Module()
    model.model.norm = Norm()
    model.model.forward = lambda tokens, positions, batch: model.model.norm(tokens[:, None].float(), tokens[:, None].float())
    model.logits_processor.forward = lambda logits: SimpleNamespace(next_token_logits=logits)
    return model


def serve(model, requests, positions, tokens, decodes):
    """Run one forward pass of these tokens."""
    slots = sorted(set(requests))
    lengths = torch.tensor([requests.count(slot) for slot in slots])
    mode = SimpleNamespace(is_decode=lambda: decodes)
    batch = SimpleNamespace(req_pool_indices=torch.tensor(slots), extend_seq_lens=lengths, forward_mode=mode)
    model.model(torch.tensor(tokens), torch.tensor(positions), batch)
    model.logits_processor(torch.tensor([[float(slot), 1.0] for slot in slots]))


def test_the_tokens_of_one_sequence_are_found_among_those_of_other_requests():
    model, rank = make_model(), RecordingRank()
    runner = SimpleNamespace(model=model, _weight_checker=SimpleNamespace(_placement={"tp_size": 1}))
    with pytest.raises(ValueError, match="nothing is recorded"):
        rank.answer({"verb": "recording", "ids": [1, 2], "prompt": 1}, 0, runner)
    rank.answer({"verb": "record"}, 0, runner)
    serve(model, [3, 3, 5, 5, 5], [1, 2, 0, 1, 2], [11, 12, 20, 11, 12], decodes=False)  # token 0 of request 3 was cached
    serve(model, [3, 5], [3, 3], [13, 23], decodes=True)
    serve(model, [3], [4], [14], decodes=True)  # beyond the end
    rank.answer({"verb": "recording", "ids": [10, 11, 12, 13, 99], "prompt": 3}, 0, runner)
    read = {
        name: rank._recorder.read([10, 11, 12, 13, 99], 3)[name].sketch.exact[:, 1].tolist() for name in ("norm", "norm.input", "lm_head")
    }
    assert read == {"norm": [0, 1, 1, 1], "norm.input": [0, 1, 1, 1], "lm_head": [0, 0, 2, 2]}
    values = [rank.answer({"verb": "recorded values", "op": "norm", "token": token}, 0, runner) for token in (0, 3)]
    assert values == [{"columns": "[]", "values": "[]"}, {"columns": "[0]", "values": "[26.0]"}]
    with pytest.raises(ValueError, match="no request with these tokens"):
        rank.answer({"verb": "recording", "ids": [10, 11, 99, 13, 99], "prompt": 3}, 0, runner)
    rank.answer({"verb": "stop recording"}, 0, runner)
    assert not model.model._forward_pre_hooks and not model.model.norm._forward_hooks and not model.logits_processor._forward_hooks


def test_float_values_that_are_not_those_of_their_bytes_are_named():
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.w13_weight = torch.nn.Parameter(torch.ones(2, 3, 4, dtype=torch.int8), requires_grad=False)
    expert = model.experts.w13_weight.detach()[1]
    try:
        values = dequant_cache.get_float_weight(expert, lambda: expert.float())
        assert find_stale(model) == {}
        values[0, :2] = 5.0
        assert find_stale(model) == {"experts.w13_weight": "2 of the 12 values of its float copy are not those of its bytes"}
    finally:
        dequant_cache.clear_cache()
