"""The search finds what a search does that estimates every candidate as a whole, and the sync's bytes are those of the real plan."""

import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.geometries import PUBLISHED, published_model

from megatron_rl.config import Config, load_config
from megatron_rl.cost.hardware import Cluster
from megatron_rl.cost.weights import count_layer_kinds
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.planner.remedies import explain
from megatron_rl.planner.search import Planner, _closeness, _powers
from megatron_rl.planner.sync_traffic import estimate_sync_traffic
from parallel.layout import Layout
from parallel.layout_hints import find_engine_problem, find_trainer_problem, keep_first_layers, keep_one_layer_per_kind, keep_one_replica
from parallel.megatron_shards import build_trainer_shards
from parallel.reshard import add_scale_transfers, check_block_alignment, reshard
from parallel.sglang_shards import build_engine_shards, check_merged_layers
from parallel.shards import GeometryError
from parallel.wrappers import unwrap

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = {"qwen3_8b": 2, "qwen2_5_32b": 4, "qwen3_30b_a3b": 2, "qwen3_235b_a22b": 16, "qwen3_5_9b": 1, "qwen3_5_35b_a3b": 2,
           "qwen3_next_80b_a3b": 4, "qwen3_5_122b_a10b": 8}  # fmt: skip


def make_job(name: str, **sections: object) -> Workload:
    train = {"layout": {"sequence_parallel": "num_experts" in PUBLISHED[name]}}
    table = {"model": {"path": "x"}, "precision": {"backend": "transformer_engine"}, "train": train, **sections}
    return Workload.from_config(Config.model_validate_json(json.dumps(table)), {"max_position_embeddings": 40960, **PUBLISHED[name]})


def assert_is_the_whole_search(planner: Planner, count: int = 5) -> None:
    """Estimate every candidate with all parts of its memory, and compare."""
    fitting, closest, refused, tried, dropped = {}, [], [], 0, Counter()
    for nodes in _powers(planner.cluster.nodes):
        for candidate in planner._candidates(nodes):
            tried += 1
            try:
                estimate = planner.estimate(candidate)
                if not estimate.fits:
                    estimate = planner.estimate(replace(candidate, recompute="full"))
            except GeometryError:
                dropped["do not divide the model"] += 1
                continue
            if planner.refuses(candidate):
                dropped["are refused by the rules of `train`"] += 1
                refused.append(estimate)
            elif not estimate.fits:
                dropped[f"are too large in phase {estimate.fullest.phase}"] += 1
                closest.append(estimate)
            else:
                key = candidate.train, candidate.placement
                fitting[key] = min(estimate, fitting.get(key, estimate), key=planner._rank_key)
        if fitting:
            break
    fastest = sorted(map(planner.with_sync, sorted(fitting.values(), key=planner._rank_key)[:count]), key=planner._rank_key)
    found = planner.search(count)
    assert (found.tried, found.dropped, found.ranked) == (tried, dropped, [each for each in fastest if each.fits])
    nearest = max(fastest, key=lambda each: each.spare) if fastest else min(reversed(closest), key=_closeness, default=None)
    assert found.closest == nearest and found.refused == min(reversed(refused), key=_closeness, default=None)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_search_of_a_dense_model_is_the_whole_search(nodes):
    assert_is_the_whole_search(Planner(make_job("Qwen3-8B"), Cluster.from_options(nodes, 8, "h100")))


@pytest.mark.long
@pytest.mark.parametrize("name, nodes", SHIPPED.items())
def test_the_search_of_a_shipped_configuration_is_the_whole_search(name, nodes, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "configs" / f"{name}.toml", [])
    job = Workload.from_config(config, read_config(config.model.folder))
    assert_is_the_whole_search(Planner(job, Cluster.from_options(nodes, 8, "h100")))


@pytest.mark.long
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.sampled_from([(1, 8), (2, 8), (3, 4), (4, 1), (2, 2)]),
    st.sampled_from(["fp8_unified", "bf16", "fp8_rollout"]),
    st.sampled_from(["h20", "h100", "h200", "gb200"]),
    st.booleans(),
)
def test_the_search_of_any_model_is_the_whole_search(name, nodes, mode, gpu, with_critic):
    algorithm = {"name": "ppo"} if with_critic else {}
    try:
        job = make_job(name, precision={"mode": mode}, algorithm=algorithm)
    except (UserError, ValidationError):  # models and modes that the rules refuse
        return
    assert_is_the_whole_search(Planner(job, Cluster.from_options(*nodes, gpu)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_published_model_is_planned_in_seconds(nodes, monkeypatch, capsys):
    """Prints the slowest (`pytest -s`). With the widths and lengths of the largest shipped configuration."""
    monkeypatch.chdir(ROOT)
    config, seconds = load_config(ROOT / "configs" / "qwen3_235b_a22b.toml", []), {}
    for line in map(json.loads, (ROOT / "configs" / "published_models.jsonl").read_text().splitlines()):
        start = time.process_time()
        try:
            planner = Planner(Workload.from_config(config, unwrap(line["config"])), Cluster.from_options(nodes, 8, "h100"))
        except UserError:
            continue
        found = planner.search(5)
        if not found.ranked:
            explain(planner, found)
        seconds[line["model"]] = time.process_time() - start
    slowest = max(seconds, key=seconds.__getitem__)
    with capsys.disabled():
        print(f"\n{8 * nodes} GPUs, {len(seconds)} models: {sum(seconds.values()):.0f} s, of which {slowest} {seconds[slowest]:.1f} s")
    assert len(seconds) > 40 and seconds[slowest] < 100  # ten times what is promised on a quiet core


def test_no_layout_that_no_batch_script_starts_is_before_one_that_it_starts():
    """Apart on one node, trainer and engines share the node, which no batch script starts. On two, each of them has one."""
    for nodes, best in ((1, "colocated"), (2, "disaggregated")):
        planner = Planner(make_job("Qwen3-8B", rollout={"max_new_tokens": 512}), Cluster.from_options(nodes, 8, "h100"))
        ranked = planner.search(200).ranked
        problems = [bool(each.candidate.find_launch_problem(planner.job, planner.cluster)) for each in ranked]
        assert (
            problems == sorted(problems)
            and True in problems
            and best in {each.candidate.placement for each in ranked[: problems.index(True)]}
        )


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B", "Qwen3.5-9B"])
@pytest.mark.parametrize("mode", ["fp8_unified", "int8_rollout"])
@pytest.mark.parametrize("candidate", [
    Candidate(Layout(tp=2, pp=2, dp=4), 4, 1, 4),
    Candidate(Layout(tp=2, pp=2, vpp=2, dp=2), 2, 1, 8, "disaggregated"),
    Candidate(Layout(pp=4, first_stage_layers=6, last_stage_layers=10, dp=4), 1, 1, 16),
])  # fmt: skip
def test_the_syncs_traffic_is_that_of_the_plan_of_all_ranks(name, mode, candidate):
    job, cluster = make_job(name, precision={"mode": mode}), Cluster.from_options(3, 8, "h100")
    if job.model.experts is not None:
        candidate = replace(candidate, train=replace(candidate.train, ep=4, etp=1), rollout_ep=candidate.rollout_tp)
    try:
        found = asdict(estimate_sync_traffic(job, candidate, cluster))
    except GeometryError:
        with pytest.raises(GeometryError):
            list(list_flows(job, candidate))
        return
    totals, gpus, pairs = Counter(), defaultdict(Counter), set()
    for source, target, nbytes in list_flows(job, candidate):
        link = "same" if source == target else "node" if source // 8 == target // 8 else "network"
        totals[link] += nbytes
        gpus["out", link][source] += nbytes
        gpus["in", link][target] += nbytes
        pairs |= {(source, target)} if source != target and nbytes else set()
    assert {link: nbytes for link, nbytes in found["total"].items() if nbytes} == totals and found["first"] == totals.total()
    assert found["busiest"] == {
        link: max((*gpus["out", link].values(), *gpus["in", link].values()), default=0) for link in found["busiest"]
    }
    assert found["readers"] == max(Counter(source for source, _ in pairs).values(), default=0)


def list_flows(job: Workload, candidate: Candidate):
    """Yield (sending GPU, receiving GPU, bytes) of all transfers that `reshard` plans, stage by stage."""
    model, width = keep_one_layer_per_kind(job.model), candidate.train.world_size // candidate.train.pp
    for stage in range(candidate.train.pp):
        gpus = {rank: candidate.engine_gpu(rank) for rank in range(candidate.engine_gpus)}
        homes = {rank: gpu - stage * width for rank, gpu in gpus.items() if 0 <= gpu - stage * width < width}
        last, kinds = stage == candidate.train.pp - 1, enumerate(count_layer_kinds(job.model, candidate.train, stage))
        counts = {"embed_tokens": stage == 0, "norm": last, "lm_head": last} | {str(kind): count for kind, count in kinds}
        sources = build_trainer_shards(model, candidate.train.one_stage, format_of=job.contract.format_of)
        targets = build_engine_shards(model, candidate.rollout_tp, candidate.rollout_ep, candidate.engines)
        for each in add_scale_transfers(reshard(sources, targets, job.contract.format_of, homes)):
            parts = each.tensor.removeprefix(model.prefix).split(".")
            if count := counts[parts[1] if parts[0] == "layers" else parts[0]]:
                yield stage * width + each.source_rank, gpus[each.target_rank], count * each.nbytes


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_few_experts_show_every_problem_of_a_layout(name):
    """All experts of all ranks have the problems that two experts have, and their first one is the same."""
    job = make_job("Qwen3-8B")
    model, format_of = keep_first_layers(published_model(name)), job.contract.format_of
    if model.experts is not None:
        model = replace(model, experts=replace(model.experts, count=8, top_k=2, groups=1, groups_used=1))
    for tp, ep, etp in ((1, 1, 1), (2, 1, 2), (4, 4, 1), (8, 1, 8), (8, 8, 1), (2, 16, 1), (4, 2, 2)):
        layout = Layout(tp=tp, ep=ep if model.experts else 1, etp=etp if model.experts else tp, dp=16)
        expected = describe(check_trainer, model, keep_one_replica(layout), format_of)
        assert str(find_trainer_problem(model, layout, format_of)) == expected
        engine_ep = ep if model.experts and ep <= tp else 1
        expected = describe(check_engine, model, tp, engine_ep, format_of)
        assert str(find_engine_problem(model, tp, engine_ep, format_of)) == expected


def describe(check, *sizes) -> str:
    try:
        check(*sizes)
    except GeometryError as error:
        return str(error)
    return "None"


def check_trainer(model, layout, format_of) -> None:
    check_block_alignment(build_trainer_shards(model, layout, format_of=format_of), format_of)


def check_engine(model, tp, ep, format_of) -> None:
    check_block_alignment(build_engine_shards(model, tp, ep), format_of)
    check_merged_layers(model, tp, format_of)
