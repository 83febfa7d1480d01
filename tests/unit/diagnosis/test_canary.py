"""The canary's comparison with scripted engines. Real engines: tests/engine/test_served.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.config import Config
from megatron_rl.diagnosis.canary import Canary, make_canary, make_prompts
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.types import Generation, SamplingParams

PROMPTS = make_prompts(2, 100, 12, seed=0)
LOGPROBS = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)


class Engines:
    """Two engines. `answers[engine, prompt]` holds the fields of an answer that differ."""

    def __init__(self, answers=None) -> None:
        self.answers = answers or {}

    def answer_canary(self, prompts_B, sampling):
        def answer(engine: int, prompt: int) -> Generation:
            changes = self.answers.get((engine, prompt), {})
            usual = {"output_ids_T": np.arange(4, dtype=np.int32), "logprobs_T": LOGPROBS, "finish_reason": "length", "policy_version": 7}
            return Generation(**usual | changes)

        return [[answer(engine, prompt) for prompt in range(len(prompts_B))] for engine in range(2)]


def run(monkeypatch, answers=None, bound=0.0, other=None) -> tuple[float, int]:
    """Return the largest difference, and the number of samples that the trainer scored."""
    asked = []

    def score(check, samples):
        asked.extend(samples)
        return {sample.number: torch.from_numpy(LOGPROBS) for sample in samples}, other

    monkeypatch.setattr(Canary, "_score", score)
    check = Canary(None, PROMPTS, SamplingParams(1.0, 4, 0), bound)
    check.ask(engines := Engines(answers))
    return check.check(Rank0(lambda: engines), 7, {}), len(asked)


def changed(token: int, by: float) -> np.ndarray:
    values = LOGPROBS.copy()
    values[token] += by
    return values


def test_engines_that_drew_the_same_tokens_cost_one_sample_a_prompt_and_nan_is_a_difference(monkeypatch):
    assert run(monkeypatch) == (0.0, 2)
    drawn = {"output_ids_T": np.array([9, 8, 7, 6], np.int32)}
    assert run(monkeypatch, {(1, 0): drawn}) == (0.0, 3)
    with pytest.raises(RunError, match="log p is nan in the engine"):
        run(monkeypatch, {(0, 1): {"logprobs_T": changed(1, float("nan"))}}, bound=1e9)


def test_a_token_that_the_seed_does_not_give_names_engine_prompt_and_tokens(monkeypatch):
    line = "^the canary fails: engine 1, prompt 0, position 13: the engine sampled token 8, .* seed give 5$"
    drawn = {(1, 0): {"output_ids_T": np.array([9, 8, 7, 6], np.int32)}}
    with pytest.raises(RunError, match=line):
        run(monkeypatch, drawn, other=(2, 13, 8, 5))
    assert run(monkeypatch, drawn, 0.1, (2, 13, 8, 5))[0] == 0.0, "without exactness, rounding may decide a draw"


@pytest.mark.parametrize("token, line", [
    (0, r"prompt 0 of 12 tokens, position 12 \(prefill\): log p is -1\.5 in the engine, -1 in the trainer; "),
    (2, r"prompt 0 of 12 tokens, position 14 \(decoding\): log p is -3\.5 .*; bound 0 \(sync\.canary_bound\)$"),
])  # fmt: skip
def test_a_difference_names_engine_prompt_position_and_phase(monkeypatch, token, line):
    answers = {(1, 0): {"logprobs_T": changed(token, -0.5)}}
    with pytest.raises(RunError, match=f"^the canary fails: engine 1, {line}"):
        run(monkeypatch, answers)
    assert run(monkeypatch, answers, bound=0.5) == (0.5, 2)


@pytest.mark.parametrize("change, line", [
    ({"policy_version": 6}, "the canary of policy version 7 fails: engine 1 answers with 4 tokens of policy version 6"),
    ({"logprobs_T": LOGPROBS[:3]}, "the canary of policy version 7 fails: engine 1 answers with 3 tokens of policy version 7"),
])  # fmt: skip
def test_an_answer_of_another_version_or_length_is_refused(monkeypatch, change, line):
    with pytest.raises(RunError, match=line):
        run(monkeypatch, {(1, 1): change})


def test_prompts_are_always_the_same_and_none_is_longer_than_the_run_takes():
    lengths = [len(prompt) for prompt in make_prompts(3, 1000, 160, seed=5)]
    assert lengths == [160, 7, 11]
    assert [len(prompt) for prompt in make_prompts(3, 1000, 9, seed=5)] == [9, 7, 9]
    first, again, other = (np.concatenate(make_prompts(2, 50, 99, seed)) for seed in (5, 5, 6))
    assert (first == again).all() and (first != other).any() and first.min() >= 0 and first.max() < 50
    assert make_prompts(0, 50, 99, 0) == []


@pytest.mark.parametrize("sections, bound", [
    ({}, 0.0),
    ({"precision": {"mode": "fp8_rollout"}}, 0.0),  # through the trainer's model with the engine's products
    ({"precision": {"mode": "fp8_rollout"}, "rollout": {"tp": 2}}, 5.0),
    ({"precision": {"reduction": "fast"}, "rollout": {"tp": 2}}, 1.0),
    ({"sync": {"canary_bound": 0.25}}, 0.25),
    ({"sync": {"canary_bound": float("inf")}}, float("inf")),
])  # fmt: skip
def test_the_bound_is_what_the_run_promises_unless_it_is_given(tmp_path, monkeypatch, sections, bound):
    hf_config = {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 384, "hidden_size": 256, "intermediate_size": 256},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 100.0},
    }
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = Config.model_validate({"model": {"path": tmp_path}, **sections})
    made = make_canary(config, SimpleNamespace(), hf_config)
    assert made._bound == bound and (made._emulated is not None) == (sections == {"precision": {"mode": "fp8_rollout"}})
    assert make_canary(Config.model_validate({"model": {"path": tmp_path}, "sync": {"canary": 0}}), SimpleNamespace(), hf_config) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert make_canary(config, SimpleNamespace(), hf_config)._bound > 0
