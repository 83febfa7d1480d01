"""Costs of models whose layers differ in their attention, by hand for Qwen3.5-9B: 24 gated delta nets and 8 layers of gated attention."""

from dataclasses import replace

import pytest
from support.geometries import HYBRIDS

from megatron_rl.config import Config
from megatron_rl.cost.activations import count_layer_activations
from megatron_rl.cost.attention import SPAN as COUNTED_SPAN
from megatron_rl.cost.operators import RankShapes, count_flops_per_token
from megatron_rl.cost.weights import count_kv_bytes_per_token, count_kv_cache, count_layer_kinds, count_state_bytes_per_request
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.kernels.gated_delta.scan import SPAN
from parallel.layout import Layout
from parallel.wrappers import unwrap

STATES = 32 * 128 * 128 * 4 + 3 * (2 * 2048 + 4096) * 2  # of a layer and request: float32 states, and inputs of the convolution in BF16


def make_job(**rollout):
    sections = {"precision": {"mode": "fp8_unified", "high": "bf16"}, "rollout": {"max_new_tokens": 64, **rollout}}
    return Workload.from_config(Config.model_validate({"model": {"path": "x"}, **sections}, strict=False), unwrap(HYBRIDS["Qwen3.5-9B"]))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_an_engine_caches_tokens_of_some_layers_and_states_of_the_others(tp):
    job = make_job(max_total_tokens=1000, max_running_requests=3, tp=tp)
    tokens, states = 8 * 2 * max(1, 4 // tp) * 256 * 2, 24 * STATES // tp
    assert (count_kv_bytes_per_token(job, tp), count_state_bytes_per_request(job, tp)) == (tokens, states)
    assert count_kv_cache(job, Candidate.from_config(job.config)) == 1000 * tokens + 3 * 4 * 262144 + (3 * 3 + 1) * states
    for more, slots in ({"enable_prefix_caching": False}, 3), ({"sglang": {"max_mamba_cache_size": 20}}, 20):
        job = make_job(max_total_tokens=1000, max_running_requests=3, tp=tp, **more)
        assert count_kv_cache(job, Candidate.from_config(job.config)) == 1000 * tokens + 3 * 4 * 262144 + (slots + 1) * states


def test_attention_of_some_layers_grows_with_the_sequence():
    job = make_job()
    longer = replace(job, config=job.config.model_copy(update={"rollout": job.config.rollout.model_copy(update={"max_new_tokens": 1088})}))
    more = longer.mean_sequence - job.mean_sequence
    assert more > 0
    recurrence = 24 * (7 * 32 * 128 * 128 + 2 * 4 * 8192)
    short, long = (count_flops_per_token(each).attention for each in (job, longer))
    assert long - short == pytest.approx(8 * more * 2 * 16 * 256)
    assert short == pytest.approx(8 * job.mean_sequence * 2 * 16 * 256 + recurrence)


def test_stages_count_kinds_of_layers_and_both_keep_activations():
    model, layout = make_job().model, Layout(tp=2, pp=2)
    assert [count_layer_kinds(model, layout, stage) for stage in (0, 1)] == [(12, 4), (12, 4)]
    delta, full = model.layer_kinds
    short, long = (RankShapes(make_job(), Layout(tp=2), tokens) for tokens in (1024, 2048))
    for kind in (delta, full):
        assert count_layer_activations(long, kind) == pytest.approx(2 * count_layer_activations(short, kind))
    states = 4 * 1024 // SPAN * 16 * 128 * 128  # float32 states of half of the heads before every span
    assert count_layer_activations(short, delta) > states > 0


def test_states_are_kept_as_often_as_the_operator_keeps_them():
    assert COUNTED_SPAN == SPAN
