"""Parts of tools/gpu_check.py on a CPU, with stand-ins for the GPU's libraries: each says what it finds, and finds what is wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_parts import (
    backends,
    bridge,
    gpu_tests,
    parts,
    products,
    quantisers,
    quickstart,
    sizes,
    speed_decode,
    speed_linears,
    speed_stack,
    speed_step,
    speed_sync,
    targets,
    training,
)
from gpu_parts.rows import Row, Rows, read_rows
from support import fake_gpu_libraries as fake_kernels
from support.gpu_machine import H200

from megatron_rl.config import load_config
from megatron_rl.precision.backends import make_backend
from megatron_rl.training.preflight import preflight

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def rows(tmp_path):
    return Rows(tmp_path / "rows.jsonl")


@pytest.fixture
def kernels(monkeypatch):
    """DeepGEMM and Transformer Engine that compute on a CPU; back ends are made anew around them."""
    fake_kernels.install(monkeypatch)
    make_backend.cache_clear()
    yield
    make_backend.cache_clear()


def found(rows: Rows) -> dict[str, Row]:
    return {row.what: row for row in read_rows(rows._path)}


def test_usable_back_ends_and_what_others_lack(rows):
    assert backends.usable(H200) == ["deep_gemm", "transformer_engine"]
    assert backends.usable(replace(H200, nvcc=None, capability=(8, 0)), rows) == []
    assert found(rows)["back end deep_gemm"].found == "left out, without hopper, nvcc"


def test_values_have_what_quantisers_stumble_over():
    x = backends.extreme(1024, 2048, "cpu").float()
    amax = x.abs().unflatten(1, (-1, 128)).amax(2)
    assert (amax == 0).any() and ((amax > 0) & (amax < 1e-4)).any() and (amax > 1e4).any() and x.isfinite().all()
    assert backends.ordinary(1024, 2048, "cpu").float().abs().unflatten(1, (-1, 128)).amax(2).min() > 1e-4


def test_quantisers_that_agree(rows, kernels, monkeypatch):
    monkeypatch.setattr(quantisers, "TOKENS", 128)
    machine = replace(H200, packages=H200.packages | {"deep_gemm": None, "sglang": None})
    which = quantisers.quantisers(machine)
    assert {library for library, _ in which} == {"reference on the GPU", "our kernel", "transformer_engine"}
    which.pop(("transformer_engine", "128x128"))  # the stand-in quantises activations only
    quantisers.check(rows, which, "cpu")
    assert len(found(rows)) == 2 * 2 * len(which)
    assert all(row.ok and row.numbers["bytes_differ"] == 0 for row in found(rows).values())


def test_a_quantiser_that_differs_is_a_fault_only_where_it_must_agree(rows):
    def half_scales(x: torch.Tensor, scale_format: str) -> quantisers.Pair:
        data, scale = quantisers.quantize_1x128(x, scale_format)
        return data, torch.where(torch.arange(len(scale))[:, None] == 7, scale / 2, scale)

    quantisers.check(rows, {("sglang", "1x128"): half_scales, ("deep_gemm", "1x128"): half_scales}, "cpu")
    told = found(rows)
    wrong = {what for what, row in told.items() if row.ok is False}
    assert wrong == {
        "sglang 1x128, pow2, ordinary values",
        "sglang 1x128, pow2, extreme values",
        "deep_gemm 1x128, pow2, ordinary values",
    }
    row = told["sglang 1x128, pow2, ordinary values"]
    assert row.numbers["scales_differ"] == 16 and "scales: 16 of 16,384 differ" in row.found and "first at [7, 0]" in row.found


def test_products_of_all_back_ends(rows, kernels):
    names = ["deep_gemm", "transformer_engine"]
    products.check(rows, names, ((64, 256, 128),), "cpu", with_sglang=False)
    told = found(rows)
    assert len(told) == 2 * (2 * 3 + 3)
    bounded = [row for what, row in told.items() if "against emulated" in what]
    assert len(bounded) == 12 and all(row.ok and row.numbers["of_bound"] <= 1 for row in bounded)
    assert told["deep_gemm fprop against transformer_engine, pow2, T=64 N=256 K=128"].ok is None


def test_a_swapped_scale_is_outside_the_bound(rows, kernels, monkeypatch):
    def swapped(x, scale_format, **how):
        of_rows, of_columns = fake_kernels.quantize_activation(x, scale_format, **how)
        of_rows[1].copy_(of_rows[1].clone().flip(0))
        return of_rows, of_columns

    monkeypatch.setattr(sys.modules["megatron_rl.precision.backends.triton_quantize"], "quantize_activation", swapped)
    products.check(rows, ["deep_gemm"], ((64, 256, 128),), "cpu", with_sglang=False)
    assert {what.split(" against")[0] for what, row in found(rows).items() if row.ok is False} == {"deep_gemm fprop", "deep_gemm dgrad"}


def test_a_back_end_that_raises_leaves_the_others_their_rows(rows, kernels, monkeypatch):
    monkeypatch.setattr("deep_gemm.fp8_gemm_nt", lambda *_, **__: 1 / 0)
    products.check(rows, ["deep_gemm", "transformer_engine"], ((64, 256, 128),), "cpu", with_sglang=False)
    told = found(rows)
    assert told["deep_gemm, pow2, T=64 N=256 K=128"].found == "ZeroDivisionError: division by zero"
    assert told["transformer_engine fprop against emulated, pow2, T=64 N=256 K=128"].ok


def test_speed_of_linears_is_told_as_rates_and_ratios(rows):
    seconds = {"bf16 fprop": 4e-3, "deep_gemm fprop": 2e-3, "bf16 quantize": 1e-4, "deep_gemm quantize": 2e-4}
    speed_linears.tell(rows, "8B", 4096, 1024, seconds)
    told = found(rows)
    assert told["8B [4096, 1024], deep_gemm fprop"].found == "2.000 ms, 34 TFLOP/s, 2.00x of BF16"
    assert told["8B [4096, 1024], deep_gemm quantize"].found == "0.200 ms, 168 GB/s, 0.50x of a copy's speed"


def test_shapes_for_which_no_time_is_left_are_named(rows, monkeypatch):
    monkeypatch.setenv(parts.SECONDS, "0")
    speed_linears.part(rows)
    left_out = {what: row.found for what, row in found(rows).items() if not what.startswith("back end")}
    assert len(left_out) == 7 and set(left_out.values()) == {"left out: no time left"}


def test_a_run_is_told_from_its_metrics(rows, tmp_path):
    steps = [
        {"step": 0, "sync/proved": 19.0, "sync/tensors": 19.0, "sync/bytes": 2e6, "time/sync": 0.01, "time/proof": 0.002},
        {"step": 1, "sync/proved": 18.0, "sync/tensors": 19.0, "mismatch/abs_mean": 1e-4, "mismatch/abs_max": 0.5},
    ]
    path = tmp_path / "metrics.jsonl"
    assert training.read_steps(path) == []
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    for step in training.read_steps(path):
        training.tell(rows, "run", step)
    told = found(rows)
    assert told["run, step 0"].found == "19 of 19 tensors proved, 2.0 MB, sync 10.0 ms, proof 2.0 ms" and told["run, step 0"].ok
    assert told["run, step 1"].ok is False and "|dlogp| mean 0.0001, largest 0.5" in told["run, step 1"].found
    training.tell(rows, "run", {"step": 2})
    assert found(rows)["run, step 2"].ok is False  # nothing was proved


def test_runs_are_configured_as_a_run_accepts(tmp_path, monkeypatch):
    def checked(settings: dict[str, object]) -> None:
        own = {"model.path": tmp_path / "model", "log.dir": tmp_path / "runs"}
        preflight(load_config(ROOT / "configs" / "quickstart.toml", [f"--{name}={value}" for name, value in (settings | own).items()]))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # all that transport and engines ask before a run
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    checked(quickstart.SETTINGS | {"precision.backend": "emulated"})
    checked(bridge.SETTINGS)


def test_a_command_is_ended_at_its_limit():
    assert training.run_bounded(["true"], 20) == 0
    assert training.run_bounded(["sleep", "60"], 0.1) is None


REPORT = """<testsuites><testsuite><testcase classname="gpu.test_a" name="test_x"/>
<testcase classname="gpu.test_a" name="test_y"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="gpu.test_b" name="test_z"><skipped message="deep_gemm: no nvcc"/></testcase></testsuite></testsuites>"""


def test_pytests_report_is_read(rows):
    gpu_tests.tell(rows, REPORT, 1)
    told = found(rows)
    assert told["gpu.test_a::test_y"] == Row("gpu.test_a::test_y", "assert 1 == 2", False)
    assert told["pytest -m gpu tests/gpu"].found == "1 passed, 1 failed, 1 skipped; exit code 1"
    assert told["skipped"].found == "deep_gemm: no nvcc"


def test_pytest_that_wrote_no_report_failed(rows):
    gpu_tests.tell(rows, "", 4)
    assert found(rows)["pytest -m gpu tests/gpu"].ok is False


def test_figures_to_beat_stand_beside_what_was_measured(rows):
    targets.add(rows, "actor update", "8 layers, fp8", "61.0 ms", 1.54, seconds=0.061)
    targets.add(rows, "sync", "a sync", "2.1 ms", 0.4449)
    told = found(rows)
    assert told["8 layers, fp8"].found == "61.0 ms; to beat: 1.54x, met" and told["8 layers, fp8"].ok is None
    assert told["a sync"].found == "2.1 ms; to beat: 0.80x, not met"
    wanted = [("actor update", "8 layers, fp8", 1.54, 1.54, "met"), ("sync", "a sync", 0.4449, 0.8, "not met")]
    assert targets.reached([*told.values(), Row("other", "1 ms")]) == wanted


def test_layers_that_fit():
    """8B: 218 million values a layer; 36 bytes of each for two actors are 7.3 GiB, what one keeps for the backward pass about two more."""
    assert sizes.layer_values(sizes.SIZES["8B"]) == 4096 * (32 * 128 * 2 + 8 * 128 * 2 + 3 * 14336)
    here = {gib: sizes.layers_that_fit(sizes.SIZES["8B"], gib, 2 * sizes.ACTOR, 8192, 32) for gib in (0.0, 79.0, 139.8, 10000.0)}
    assert here == {0.0: 1, 79.0: 6, 139.8: 11, 10000.0: 32}
    assert speed_stack.layers_here(H200) == 11 and speed_step.layers_here(H200) == 9
    assert sizes.stack("8B", 3, vocab_size=512).num_hidden_layers == 3


class Decoder:
    """Plays an engine that is up: so many tokens for every prompt, or none any more."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.asked = fails, []

    def generate(self, prompts, sampling):
        if self.fails:
            raise RuntimeError("out of memory")
        self.asked.append((len(prompts), sampling.max_new_tokens))
        return [SimpleNamespace(output_ids_T=[1] * sampling.max_new_tokens) for _ in prompts]


def test_decoding_is_told_for_every_batch_size_and_engine_that_lives(rows):
    engines = {"bf16": Decoder(), "fp8": Decoder(), "int8": Decoder(fails=True)}
    speed_decode.measure(rows, "tiny", engines, (1, 4), tokens=8, repeat=2)
    told = found(rows)
    assert engines["fp8"].asked == [(1, 8)] * 3 + [(4, 8)] * 3
    assert told["tiny decoding 4 at once, bf16"].numbers["tokens_per_second"] > 0
    assert told["tiny decoding 1 at once, fp8"].numbers["target"] == "rollout"
    assert told["tiny decoding 4 at once, int8"] == Row("tiny decoding 4 at once, int8", "RuntimeError: out of memory", False)


def test_decoding_without_a_bf16_engine_has_no_ratio(rows):
    speed_decode.tell(rows, "8B", 2, {"fp8": 1000.0})
    assert found(rows)["8B, fp8"].found == "1,000 tokens/s, 500 for each sequence"


def test_phases_of_an_rl_step_are_held_against_bf16(rows):
    bf16 = {"rollout": 2.0, "reference forward": 0.9, "actor forward": 0.9, "actor update": 3.0, "sync": 0.2, "whole step": 7.0}
    speed_step.tell(rows, {"bf16": bf16, "fp8": {**bf16, "actor update": 2.0, "whole step": 6.0}})
    told = found(rows)
    assert told["RL step: actor update, fp8"].found == "2000.0 ms, 1.50x of BF16; to beat: 1.54x, not met"
    assert told["RL step: whole step, fp8"].found == "6000.0 ms, 1.17x of BF16; to beat: 1.16x, met"
    assert told["RL step: sync, fp8"].found == "200.0 ms, 1.00x of BF16"  # its figure is a copy's speed, not BF16's
    assert told["RL step: whole step, bf16"].numbers == {"seconds": 7.0}


def test_what_a_sync_costs_is_told_as_shares(rows):
    seconds = {"sync without its proof": 3e-3, "sync with the streamed proof": 4e-3, "copy on the device": 2.7e-3}
    speed_sync.tell(rows, "ipc", 8_000_000_000, seconds | {"gather, convert, quantise": 0.2})
    told = found(rows)
    assert told["ipc: sync without its proof"].found.endswith("0.900 of the copy's speed; to beat: 0.80x, met")
    assert told["ipc: the proof's share"].found == "25.0% of the sync's time"
    assert told["ipc: against gathering, converting, quantising"].found == "50.00 times as fast, proof included"
