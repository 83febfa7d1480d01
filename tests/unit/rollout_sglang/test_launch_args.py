"""Arguments and environment of an engine's process, and which arguments `[rollout.sglang]` may hold. SGLang is not imported."""

import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import ARCHITECTURES

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.rollout import memory_saver
from rollout_sglang import SGLangLauncher, launch_args, server_options
from rollout_sglang.hooks import blackwell, gated_delta, gpu_activation_quant, split_attention
from rollout_sglang.launch_args import DISABLED_MODELS_VARIABLE, leave_out_other_models
from rollout_sglang.platform.activate import NAME, activate
from rollout_sglang.server_options import EXCEPTIONS, GROUPS, SET_BY, check, make_arguments, read_arguments

PRECOMPILE = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts an engine's process on a GPU and returns its arguments and environment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv(PRECOMPILE, raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch_args, "read_config", lambda folder: ARCHITECTURES["qwen3"])
    monkeypatch.setattr(launch_args, "EngineProcess", lambda arguments, environment, _: started.append((arguments, environment)))

    def start_process(
        mode: str = "bf16",
        kind: str = "colocated",
        rollout: dict | None = None,
        kv: str = "high",
        high: str = "bf16",
        precision: dict | None = None,
        **more: Any,
    ):
        sections = {
            "precision": {"mode": mode, "kv": kv, "high": high, **(precision or {})},
            "rollout": rollout or {},
            "placement": {"kind": kind},
        }
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


def test_the_attention_that_the_trainer_shares_is_chosen_by_the_model(start, monkeypatch):
    for width, given, backend in ((128, None, "fa3"), (64, None, "triton"), (128, "triton", "triton")):
        monkeypatch.setattr(launch_args, "read_config", lambda folder, width=width: ARCHITECTURES["qwen3"] | {"head_dim": width})
        arguments, environment = start(
            "bf16", "disaggregated", precision={"reduction": "ranks"}, rollout={"sglang": {"attention_backend": given}} if given else {}
        )
        options = dict(pairwise(arguments))
        assert options["--attention-backend"] == environment[split_attention.BACKEND_VARIABLE] == backend
        assert (options.get("--cuda-graph-backend-prefill") == "disabled") == (backend == "triton")


def test_sums_over_ranks_are_a_step_of_their_own_on_a_gpu(start, monkeypatch):
    """SGLang would otherwise enable FlashInfer's all-reduce with a norm for models with experts."""
    flag = "--enforce-disable-flashinfer-allreduce-fusion"
    assert flag in start("fp8_unified")[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flag not in start("fp8_unified")[0]


@pytest.mark.parametrize("mode", ["fp8_unified", "int8_rollout", "bf16"])
def test_blackwell_does_not_get_sglangs_defaults(start, monkeypatch, mode):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    options = dict(pairwise(start(mode)[0]))
    assert options.items() >= {f"--{name}": value for name, value in blackwell.SERVER_OPTIONS.items()}.items()
    assert dict(pairwise(start(mode, kv="e4m3_per_layer")[0]))["--attention-backend"] == "flashinfer"


@pytest.mark.parametrize("argument, value", [(name, value) for name, refused in blackwell.REFUSED.items() for value in refused])
def test_refused_kernels_on_blackwell_are_named_with_the_reason(monkeypatch, argument, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    config = Config.model_validate({"model": {"path": Path("m")}, "rollout": {"sglang": {argument: value}}})
    with pytest.raises(UserError) as caught:
        SGLangLauncher().check(config)
    rule = f"{blackwell.REFUSED[argument][value]} (on Blackwell)"
    assert str(caught.value) == f"rollout.sglang.{argument} = {value!r}: {rule}; leave it out"


def test_caches_in_e4m3_have_the_attention_that_rounds_nothing_else_and_the_prefix_cache_is_on_by_default(start):
    arguments, environment = start(kv="e4m3_per_layer")
    assert environment["MEGATRON_RL_KV"] == "e4m3_per_layer"
    options = dict(pairwise(arguments))
    assert options["--kv-cache-dtype"] == "fp8_e4m3" and options["--attention-backend"] == "flashinfer"
    assert not {"--kv-cache-dtype", "--attention-backend"} & set(start()[0])
    assert dict(pairwise(start(seed=7)[0]))["--random-seed"] == "7"
    arguments, _ = start()
    assert "--disable-radix-cache" not in arguments and "--chunked-prefill-size" not in arguments
    assert not {"--fp8-gemm-backend", "--moe-runner-backend"} & set(arguments)
    arguments, _ = start(rollout={"enable_prefix_caching": False, "chunked_prefill_size": 512})
    assert "--disable-radix-cache" in arguments and arguments[arguments.index("--chunked-prefill-size") + 1] == "512"


TRITON = {"sglang": {"attention_backend": "triton"}}


@pytest.mark.parametrize(("precision", "line"), [
    ({"mode": "fp8_unified", "reduction": "fast"}, ""),
    ({"mode": "bf16", "reduction": "fast"}, ""),
    ({"mode": "fp8_rollout"}, ""),  # the engine alone is quantized, so bits are not promised
    ({"mode": "int8_rollout"}, ""),
    ({"mode": "fp8_unified"}, "adds up in an order of its own, but precision.reduction = 'tree' asks for the trainer's; set"),
    ({"mode": "bf16"}, "adds up in an order of its own, but precision.reduction = 'tree'"),
    ({"mode": "fp8_rollout", "kv": "e4m3_per_layer"}, "rounds queries and probabilities with precision.kv = 'e4m3_per_layer'; leave"),
])  # fmt: skip
def test_triton_attends_on_a_gpu_only_where_bits_are_not_promised(monkeypatch, start, precision, line):
    """The fixture is a GPU."""
    config = Config.model_validate({"model": {"path": Path("m")}, "precision": precision, "rollout": TRITON})
    if line:
        with pytest.raises(UserError) as refused:
            SGLangLauncher().check(config)
        assert str(refused.value).startswith(f"rollout.sglang.attention_backend = 'triton': {line}")
        return
    SGLangLauncher().check(config)
    assert ("--attention-backend", "triton") in pairwise(start(precision["mode"], rollout=TRITON)[0])
    other = Config.model_validate(
        {"model": {"path": Path("m")}, "precision": precision, "rollout": {"sglang": {"attention_backend": "fa4"}}}
    )
    with pytest.raises(UserError, match="computes with a different kernel"):
        SGLangLauncher().check(other)


def test_flash_attention_3_may_be_named_where_the_trainer_shares_it(monkeypatch, start):
    """The fixture is a GPU."""

    def check_named(reduction):
        rollout = {"sglang": {"attention_backend": "fa3"}}
        precision = {"mode": "bf16", "reduction": reduction}
        SGLangLauncher().check(Config.model_validate({"model": {"path": Path("m")}, "precision": precision, "rollout": rollout}))

    check_named("ranks")
    with pytest.raises(UserError, match="computes with a different kernel"):
        check_named("fast")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="computes with a different kernel"):
        check_named("ranks")


def test_only_an_empty_engine_loads_no_weights_cuda_graphs_stay_on_and_arguments_of_a_benchmark_come_last(start, monkeypatch):
    assert "--load-format" not in start()[0] and start(empty=True)[0][-2:] == ["--load-format", "dummy"]
    arguments, _ = start(kind="disaggregated", arguments=("--load-format", "dummy"))
    assert arguments[-2:] == ["--load-format", "dummy"]
    graphs = [argument for argument in arguments if "cuda-graph" in argument]
    assert graphs == ["--cuda-graph-max-bs-decode"] and ("--cuda-graph-max-bs-decode", "256") in pairwise(arguments)
    assert "--disable-overlap-schedule" not in arguments
    arguments = start(kind="disaggregated", rollout={"sglang": {"cuda_graph_bs_decode": [1, 300]}})[0]
    assert "--cuda-graph-max-bs-decode" not in arguments
    option, value = "--cuda-graph-backend-prefill", "disabled"  # such graphs cannot be released
    assert (option, value) in pairwise(start()[0])
    arguments = start(rollout={"sglang": {"cuda_graph_backend_prefill": "full"}})[0]
    assert arguments.count(option) == 1 and (option, "full") in pairwise(arguments)
    monkeypatch.setattr(launch_args, "read_config", lambda folder: ARCHITECTURES["deepseek_v3"])  # SGLang absorbs kv_b in such graphs
    assert (option, value) in pairwise(start(kind="disaggregated")[0])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_recurrent_states_keep_their_formats_and_only_a_quantized_engine_has_sglangs_own_delta_rule(start, monkeypatch, family):
    monkeypatch.setattr(launch_args, "read_config", lambda folder: ARCHITECTURES[family])
    arguments, environment = start("fp8_unified", kind="disaggregated")
    assert environment["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16" and environment["SGLANG_MAMBA_SSM_DTYPE"] == "float32"
    assert gated_delta.SHARED_VARIABLE in environment and "--disable-overlap-schedule" in arguments
    options = dict(pairwise(arguments))
    assert options["--mamba-radix-cache-strategy"] == "no_buffer" and options["--max-mamba-cache-size"] == str(3 * 256)
    assert options["--cuda-graph-backend-prefill"] == "disabled" and "--cuda-graph-backend-decode" not in options
    arguments, _ = start("fp8_unified", kind="disaggregated", rollout={"enable_prefix_caching": False})
    assert "--disable-radix-cache" in arguments and "--disable-overlap-schedule" not in arguments
    arguments, environment = start("fp8_rollout", kind="disaggregated")
    assert gated_delta.SHARED_VARIABLE not in environment and not any("mamba" in argument for argument in arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments, environment = start(rollout={"max_running_requests": 16})
    assert dict(pairwise(arguments))["--max-mamba-cache-size"] == "48"
    arguments, environment = start(rollout={"max_running_requests": 16, "enable_prefix_caching": False}, high="fp32")
    assert dict(pairwise(arguments))["--max-mamba-cache-size"] == "16" and environment["SGLANG_MAMBA_CONV_DTYPE"] == "float32"


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
OWN = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Qwen3Moe": "qwen3_moe", "Glm4": "glm4", "Glm4Moe": "glm4_moe"}
OWN = {f"{name}ForCausalLM": file for name, file in {**OWN, "DeepseekV3": "deepseek_v2"}.items()}


@pytest.mark.parametrize("architecture", OWN)
def test_the_file_that_defines_the_model_stays_and_the_others_are_left_out(architecture):
    left_out = set(leave_out_other_models([architecture])[DISABLED_MODELS_VARIABLE].split(","))
    assert OWN[architecture] in FILES - left_out and left_out < FILES and len(left_out) > 100
    for name in FILES - left_out - {OWN[architecture]}:
        text = (FOLDER / f"{name}.py").read_text()
        assert f"class {architecture}" in text or "\nclass " not in text, name
    assert leave_out_other_models([]) == leave_out_other_models(["UnknownForCausalLM"]) == {}


def test_the_cpu_platform_answers_only_when_it_is_chosen(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", NAME)
    assert activate() == "rollout_sglang.platform.cpu.CpuPlatform"


USEFUL = {
    "mem_fraction_static": 0.8,
    "max_prefill_tokens": 32768,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 1,
    "cuda_graph_bs_decode": [1, 2, 4],
    "disable_cuda_graph": False,
    "disable_custom_all_reduce": True,
    "watchdog_timeout": 600.0,
}


def test_options_for_large_models_pass():
    check(USEFUL)
    graphs = ["--cuda-graph-bs-decode", "1", "2", "4"]
    assert make_arguments(USEFUL)[-7:] == [*graphs, "--disable-custom-all-reduce", "--watchdog-timeout", "600.0"]
    assert "--disable-cuda-graph" not in make_arguments(USEFUL)
    assert make_arguments({"extra_metric_labels": {"run": "a"}}) == ["--extra-metric-labels", '{"run": "a"}']


@pytest.mark.parametrize(("options", "line"), [
    ({"quantization": "fp8"}, "rollout.sglang.quantization = 'fp8': is set by precision.mode; set precision.mode"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "is set by precision.kv"),
    ({"attention_backend": "triton"}, "computes with a different kernel than the precision graph says; leave it out"),
    ({"decode_attention_backend": "triton"}, "computes with a different kernel than the precision graph says; leave it out"),
    ({"prefill_attention_backend": "fa3"}, "computes with a different kernel"),
    ({"triton_attention_num_kv_splits": 8}, "computes with a different kernel"),
    ({"triton_attention_split_tile_size": 256}, "computes with a different kernel"),
    ({"bf16_gemm_backend": "auto"}, "computes with a different kernel"),
    ({"fp8_gemm_runner_backend": "triton"}, "computes with a different kernel"),
    ({"enable_deterministic_inference": True}, "computes with a different kernel"),
    ({"enable_quant_communications": True}, "computes with a different kernel"),
    ({"enable_flashinfer_allreduce_fusion": True}, "computes with a different kernel"),
    ({"enable_mixed_chunk": True}, "has not been tested with the hooks of this project"),
    ({"enable_two_batch_overlap": True}, "has not been tested"),
    ({"enable_fp32_lm_head": True}, "has not been tested"),
    ({"moe_runner_backend": "deep_gemm"}, "computes with a different kernel"),
    ({"speculative_algorithm": "EAGLE"}, "draws tokens by rules that the trainer does not repeat, among proposals of weights that no"),
    ({"speculative_num_draft_tokens": 4}, "draws tokens by rules that the trainer does not repeat, among proposals of weights that no"),
    ({"custom_weight_loader": ["m.f"]}, "sets the served model or its format"),
    ({"enable_hierarchical_cache": True}, "keeps keys and values of older weights"),
    ({"enable_dp_attention": True}, "places ranks or weights where the sync does not expect them"),
    ({"speculative_eagle_topk": 4}, "draws tokens by rules that the trainer does not repeat"),
    ({"enable_torch_compile": True}, "computes with a different kernel"),
    ({"cuda_graph_config": {"prefill": {"compiler": "inductor"}}}, "computes with a different kernel"),
    ({"cuda_graph_config": {"prefill": {"backend": "tc_piecewise"}}}, "computes with a different kernel"),
    ({"lora_paths": ["a"]}, "serves weights that no sync fills and proves"),
    ({"mem_fraction": 0.8}, "is not a server argument of SGLang; did you mean mem_fraction_static?"),
    ({"mem_fraction_static": "most"}, "must be of type float"),
    ({"disable_cuda_graph": 1}, "must be of type bool"),
    ({"max_prefill_tokens": True}, "must be of type int"),
    ({"_swa_full_tokens_ratio_explicitly_set": True}, "is not a server argument of SGLang"),
])  # fmt: skip
def test_options_that_would_break_a_promise_are_refused_by_name(options, line):
    with pytest.raises(UserError) as refused:
        check(options)
    assert line in str(refused.value)


@pytest.mark.parametrize("options", [{"cuda_graph_bs_decode": [1, 64]}, {"cuda_graph_max_bs_decode": 64}])
def test_the_largest_batch_has_a_graph(options):
    def make(requests, **more):
        return Config.model_validate(
            {"model": {"path": Path("m")}, "rollout": {"max_running_requests": requests, "sglang": options | more}}
        )

    for config in (make(64), make(65, disable_cuda_graph=True)):
        SGLangLauncher().check(config)
    with pytest.raises(UserError, match=r"leaves batches of up to 65 requests .* set rollout.max_running_requests = 64"):
        SGLangLauncher().check(make(65))


def test_the_table_is_of_this_sglang():
    """A new release may add groups and remove names. The names in the table exist, and every argument is decided."""
    known = read_arguments()
    assert len(known) > 400 and {group for group, _ in known.values()} == GROUPS.keys()
    assert EXCEPTIONS.keys() | SET_BY.keys() <= known.keys()
    for name, reason in EXCEPTIONS.items():
        assert reason != GROUPS[known[name][0]], name  # it would be no exception


def test_an_unknown_group_is_refused(monkeypatch):
    monkeypatch.setattr(server_options, "GROUPS", {})
    with pytest.raises(UserError, match="is of a kind that is unknown to this project"):
        check({"mem_fraction_static": 0.8})


def test_without_sglang_the_table_alone_decides(monkeypatch):
    monkeypatch.setattr(server_options, "read_arguments", dict)
    check({"anything": 1})
    with pytest.raises(UserError, match="is set by rollout.tp"):
        check({"tp_size": 2})


def test_sglang_is_read_not_imported():
    asked = "import sys; from rollout_sglang.server_options import check; check({'log_level': 'info'})"
    code = f"{asked}; print('sglang' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
