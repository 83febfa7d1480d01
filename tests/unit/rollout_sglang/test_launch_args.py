"""Arguments and environment of an engine's process on a GPU machine, tested without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatron_rl.config import Config
from megatron_rl.rollout import memory_saver
from rollout_sglang import launch_args
from rollout_sglang.hooks import gpu_activation_quant
from rollout_sglang.launch_args import DISABLED_MODELS_VARIABLE, leave_out_other_models
from rollout_sglang.platform.activate import NAME, activate

PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


@pytest.fixture
def start(monkeypatch):
    """Arguments and environment of an engine's process on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(PRECOMPILE, raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch_args, "read_config", lambda folder: {})
    monkeypatch.setattr(launch_args, "EngineProcess", lambda arguments, environment, _: started.append((arguments, environment)))

    def start_process(mode: str = "bf16", kind: str = "colocated", rollout: dict | None = None, kv: str = "high", **more: object):
        sections = {"precision": {"mode": mode, "kv": kv}, "rollout": rollout or {}, "placement": {"kind": kind}}
        config = Config.model_validate({"model": {"path": Path("m")}, **sections})
        launch_args.EngineLaunchSpec(config, Path("m"), Path("logs"), **more).start_process()
        return started[-1]

    return start_process


def test_deep_gemm_is_not_compiled_beforehand_unless_the_user_says_so(start, monkeypatch):
    scales = gpu_activation_quant.SCALE_FORMAT_VARIABLE
    assert start("bf16")[1].items() >= {PRECOMPILE: "false"}.items() and scales not in start("bf16")[1]
    assert start("fp8_unified")[1].items() >= {PRECOMPILE: "false", scales: "pow2"}.items()
    monkeypatch.setenv(PRECOMPILE, "true")
    assert start("fp8_unified")[1][PRECOMPILE] == "true"


def test_a_cache_in_e4m3_has_the_attention_that_rounds_nothing_else(start):
    arguments, environment = start(kv="e4m3_per_layer")
    assert environment["MEGATRON_RL_KV"] == "e4m3_per_layer"
    options = dict(pairwise(arguments))
    assert options["--kv-cache-dtype"] == "fp8_e4m3" and options["--attention-backend"] == "flashinfer"
    assert not {"--kv-cache-dtype", "--attention-backend"} & set(start()[0])


def test_only_an_empty_engine_loads_no_weights(start):
    assert "--load-format" not in start()[0] and start(empty=True)[0][-2:] == ["--load-format", "dummy"]


def test_cuda_graphs_stay_on_and_arguments_of_a_benchmark_come_last(start):
    arguments, _ = start(kind="disaggregated", arguments=("--load-format", "dummy"))
    assert arguments[-2:] == ["--load-format", "dummy"]
    assert not any("cuda-graph" in argument for argument in arguments) and "--disable-overlap-schedule" not in arguments


def test_an_engine_that_releases_its_memory_has_no_graphs_of_prefill_that_cannot_be_released(start):
    option, value = "--cuda-graph-backend-prefill", "disabled"
    assert (option, value) in pairwise(start()[0])
    arguments = start(rollout={"sglang": {"cuda_graph_backend_prefill": "full"}})[0]
    assert arguments.count(option) == 1 and (option, "full") in pairwise(arguments)


def test_the_prefix_cache_is_on_and_chunks_are_sglangs_unless_the_user_says_so(start):
    arguments, _ = start()
    assert "--disable-radix-cache" not in arguments and "--chunked-prefill-size" not in arguments
    arguments, _ = start(rollout={"enable_prefix_caching": False, "chunked_prefill_size": 512})
    assert "--disable-radix-cache" in arguments and arguments[arguments.index("--chunked-prefill-size") + 1] == "512"


def test_only_an_engine_that_shares_devices_releases_its_memory(start, monkeypatch):
    monkeypatch.setattr(memory_saver, "find_cuda_runtime", lambda cuda: Path("/site/cu13/libcudart.so.13"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    variables = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH", "LD_LIBRARY_PATH"}
    arguments, environment = start()
    assert "--enable-memory-saver" in arguments and environment["LD_LIBRARY_PATH"].startswith("/site/cu13") and variables < set(environment)
    arguments, environment = start(kind="disaggregated")
    assert "--enable-memory-saver" not in arguments and not variables & set(environment)


FOLDER = Path(find_spec("sglang").origin).parent / "srt" / "models"
FILES = {file.stem for file in FOLDER.glob("*.py")}
OWN = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}


@pytest.mark.parametrize("architecture", OWN)
def test_the_file_that_defines_the_model_stays_and_the_others_are_left_out(architecture):
    left_out = set(leave_out_other_models([architecture])[DISABLED_MODELS_VARIABLE].split(","))
    assert OWN[architecture] in FILES - left_out and left_out < FILES and len(left_out) > 100
    for name in FILES - left_out - {OWN[architecture]}:
        text = (FOLDER / f"{name}.py").read_text()
        assert f"class {architecture}" in text or "\nclass " not in text, name


@pytest.mark.parametrize("architectures", [[], ["UnknownForCausalLM"]])
def test_for_a_model_that_no_file_defines_nothing_is_left_out(architectures):
    assert leave_out_other_models(architectures) == {}


def test_the_cpu_platform_answers_only_when_it_is_chosen(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", NAME)
    assert activate() == "rollout_sglang.platform.cpu.CpuPlatform"
