"""The least element-wise bytes of models, compared with sums by hand, operator by operator."""

from pathlib import Path

import pytest
from support.geometries import PUBLISHED

from megatron_rl.config import Config
from megatron_rl.cost.activations import count_least_bytes_in_pass, count_least_bytes_per_update
from megatron_rl.cost.workload import Candidate, Workload
from parallel.model_geometry import ModelGeometry

T, G = 1024, 1 + 4 / 128


def make_job(name: str, mode: str = "fp8_unified", **layout: object) -> tuple[Workload, Candidate]:
    sections = {"model": {"path": Path("model")}, "precision": {"mode": mode, "backend": "transformer_engine"}}
    sections |= {"train": {"micro_batch_tokens": T, "layout": layout}}
    config = Config.model_validate({**sections, "rollout": {"max_new_tokens": 512}, "data": {"max_prompt_tokens": 128}})
    return Workload(ModelGeometry.from_hf_config(PUBLISHED[name]), config, PUBLISHED[name]), Candidate.from_config(config)


@pytest.mark.parametrize(("mode", "b", "g"), [("fp8_unified", 2, G), ("bf16", 2, 2)])
def test_a_dense_layer_is_the_sum_of_its_operators(mode, b, g):
    job, candidate = make_job("Qwen3-8B", mode)
    h, q, kv, f, vocabulary, layers = 4096, 4096, 1024, 12288, 151936, 36

    def forward(w: float) -> float:
        return 2 * T * h * (3 * b + w) + T * 2 * b * (q + kv) + T * q * (b + w) + T * f * (2 * b + w)

    ends = T * h * 2 * b + T * b * vocabulary
    assert count_least_bytes_in_pass(job, candidate, 0, trains=False) == pytest.approx(layers * forward(g) + ends)
    w = 2 * g if mode == "fp8_unified" else b
    backward = 2 * T * h * (3 * b + w) + T * (2 * b * (q + kv) + b * kv + w * (q + 2 * kv)) + T * f * (3 * b + 2 * w)
    ends = T * h * 2 * b + T * h * (b + 8) + 3 * T * b * vocabulary
    assert count_least_bytes_in_pass(job, candidate, 0, trains=True) == pytest.approx(layers * (forward(w) + backward) + ends)


def test_layouts_share_the_bytes_of_a_pass():
    whole = count_least_bytes_in_pass(*make_job("Qwen3-8B"), 0, trains=True)
    assert whole is not None and count_least_bytes_in_pass(*make_job("DeepSeek-V3"), 0, trains=True) is None
    assert count_least_bytes_in_pass(*make_job("Qwen3-8B", tp=4), 0, trains=True) == pytest.approx(whole / 4)
    stages = [count_least_bytes_in_pass(*make_job("Qwen3-8B", pp=2), stage, trains=True) for stage in (0, 1)]
    assert sum(stages) == pytest.approx(whole) and 0 < stages[0] < stages[1]
    one, all_ranks = (count_least_bytes_in_pass(*make_job("Qwen3-30B-A3B", tp=1, ep=ep, dp=8), 0, trains=True) for ep in (1, 8))
    assert one == all_ranks, "a balanced router gives every rank as many tokens"


def test_an_optimizer_step_counts_the_masters_of_a_rank():
    alone, sharded = (count_least_bytes_per_update(*make_job("Qwen3-8B", dp=dp), 0) for dp in (1, 4))
    weights = 8.19e9
    assert alone == pytest.approx(weights * (8 + 28 + 2 * G), rel=0.02) and alone - sharded == pytest.approx(weights * 21, rel=0.01)
