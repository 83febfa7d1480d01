"""What an engine's process is started with on a GPU machine, told without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config import Config, PrecisionConfig
from megatron_rl.precision.contract import PrecisionContract
from rollout_sglang import launch_args
from rollout_sglang.hooks import gpu_activation_quant

PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(PRECOMPILE, raising=False)


def environment(mode: str) -> dict[str, str]:
    return launch_args._environment(1, PrecisionContract.from_config(PrecisionConfig.model_validate({"mode": mode})), 0)


def test_deep_gemm_is_not_compiled_beforehand_unless_the_user_says_so(gpu, monkeypatch):
    assert environment("bf16") == {PRECOMPILE: "false"}
    assert environment("fp8_unified") == {PRECOMPILE: "false", gpu_activation_quant.SCALE_FORMAT_VARIABLE: "pow2"}
    monkeypatch.setenv(PRECOMPILE, "true")
    assert environment("fp8_unified")[PRECOMPILE] == "true"


def test_cuda_graphs_stay_on_and_arguments_of_a_benchmark_come_last(gpu, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(launch_args, "EngineProcess", lambda arguments, *_: started.append(arguments))
    launch_args.EngineLaunchSpec(
        Config.model_validate({"model": {"path": Path("m")}}), Path("m"), Path("logs"), arguments=("--load-format", "dummy")
    ).start_process()
    (arguments,) = started
    assert arguments[-2:] == ["--load-format", "dummy"]
    assert not any("cuda-graph" in argument for argument in arguments) and "--disable-overlap-schedule" not in arguments
