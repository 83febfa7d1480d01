"""Checks of the GPU code against the pinned packages, on a machine without a GPU. tools/gpu_packages.sh installs them and runs this file.

    python tools/gpu_packages.py            # all checks, each in its own process with a fake Hopper GPU; exit code 1 if one fails
    python tools/gpu_packages.py NAME ...   # only these checks

The checks import, hook, compare, and compile real code. Nothing is computed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_parts import PARTS, WARM_UP, Part

from megatron_rl.rehearsal import hopper

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])
_ONLY = "--in-this-process"
_NVCC_OPTIONS = [
    *("-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda"),
    *("-diag-suppress=39,161,174,177,186,940", "--ptxas-options=--verbose"),
]
_BY_THEMSELVES = ("experts",)
"""Checks that set up the fake GPU themselves, before torch is imported."""


class NotInstalledError(Exception):
    """An optional package is not installed."""


CHECKS: dict[str, Callable[[], str]] = {}
"""Name -> check. A check returns a short summary and raises if it fails."""


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


@check
def packages() -> str:
    """Run `pip check`."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert not done.returncode, done.stdout
    return done.stdout.strip()


@check
def backends() -> str:
    """Import every module that is only imported inside functions, and the libraries that such functions import."""
    modules = [*sorted((ROOT / "megatron_rl" / "kernels").rglob("*triton*.py")), ROOT / "parallel" / "digest_triton.py"]
    modules += sorted((ROOT / "megatron_rl" / "kernels").rglob("deep_gemm.py"))
    for file in modules:
        importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    for library in ("deep_gemm", "sgl_kernel", "flashinfer", "torch_memory_saver", "tvm_ffi"):
        importlib.import_module(library)
    return f"{len(modules)} modules"


@check
def transformer_engine_extension() -> str:
    """Check that the back end can make its quantizers without importing Transformer Engine first."""
    if not _has_extension():
        raise NotInstalledError("its torch extension is not installed (--extension=FILE)")
    from megatron_rl.kernels.linear import make_backend
    from parallel.formats import FP8

    backend: Any = make_backend("transformer_engine", FP8.with_scales("pow2"))
    for quantizer, dimensions in ((backend._activations, 1), (backend.weight_quantizer, 2)):
        assert quantizer.block_scaling_dim == dimensions and quantizer.force_pow_2_scales and quantizer.amax_epsilon == 1e-10
    import megatron.core.extensions.transformer_engine as layers

    return f"{type(quantizer).__name__}, {layers.TELinear.__name__} of Megatron"


@check
def signatures() -> str:
    """Compare the parameters of library functions with those of the shape functions that replace them in a rehearsal, and the parameters
    of torch's `varlen_attn` with the arguments that are passed to it."""
    from torch.nn.attention.varlen import varlen_attn

    from megatron_rl.rehearsal.signatures import LIBRARIES, compare, is_installed
    from rollout_sglang.rehearsal.signatures import list_kernels

    assert all(map(is_installed, LIBRARIES))
    kernels = list_kernels()
    assert not (wrong := compare(kernels)), "\n".join(wrong)
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"]
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert [name for name in parameters if name in names] == names, f"varlen_attn{parameters}"
    return f"{len(kernels) + 1} functions"


@check
def engine() -> str:
    """Import SGLang as an engine process does. Check that every hook is applied with the right parameters, also to copied references of a
    function, and that dense layers use DeepGEMM with FP32 scales."""
    from rollout_sglang.hooks import gpu_activation_quant, registry
    from rollout_sglang.platform import stub_modules

    os.environ[gpu_activation_quant.SCALE_FORMAT_VARIABLE] = "pow2"
    stub_modules.install()
    stub_modules.block_megatron()
    registry.verify()
    for target, function, kind in registry.list_gpu_hooks():
        module, _, name = target.rpartition(".")
        hooked = getattr(importlib.import_module(module), name)
        theirs, ours = (list(inspect.signature(each).parameters) for each in (hooked.__wrapped__, function))
        assert theirs == ours[kind == "AROUND" :], f"{target}: {theirs}, {ours}"
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.quantization import fp8, fp8_utils

    for module, name in ((fp8, "dispatch_w8a8_block_fp8_linear"), (fused_moe, "per_token_group_quant")):
        assert hasattr(getattr(module, name), "__wrapped__"), f"the reference in {module.__name__} is not hooked"
    assert fp8_kernel._is_cuda and deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM and not deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
    for ue8m0 in (False, True):
        linear = fp8.dispatch_w8a8_block_fp8_linear([128, 128], act_scale_ue8m0=ue8m0)
        assert linear is fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback, linear
    return f"{len(registry._list_hooks())} hooks"


@check
def experts() -> str:
    """Let SGLang's runner build a model with an engine's arguments, on tensors without data. Check that FP8 experts use Triton, and that
    loading leaves every block and scale as it was: not requantized, transposed, or shuffled."""
    from rollout_sglang.rehearsal import rank as rehearsed_rank

    rehearsed_rank.install_gpu(replaces_installed=False)
    from rollout_sglang.hooks import registry
    from rollout_sglang.rehearsal import runner as rehearsed_runner

    registry.verify()
    import torch
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.moe.moe_runner.triton import TritonRunnerCore, fused_experts_none_to_triton
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

    from megatron_rl.config import load_config
    from megatron_rl.cost.hardware import GPUS
    from megatron_rl.rehearsal.fake_cuda import one_rank

    deep_gemm_wrapper.update_deep_gemm_config = lambda *_: None  # asks the driver
    for method in (Fp8LinearMethod, Fp8MoEMethod):
        method.process_weights_after_loading = _check_weights_unchanged(method.process_weights_after_loading)
    config: Any = load_config(ROOT / "configs" / "qwen3_30b_a3b.toml", [])
    with rehearsed_rank.describe_job(config) as (arguments, _), one_rank(0, config.rollout.tp, GPUS["h100"]):
        model = rehearsed_runner.start(arguments, 0).model
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    for layer in layers:
        method = layer.quant_method
        found = type(layer), type(method), type(method.runner.runner_core), method.runner.fused_func
        assert found == (FusedMoE, Fp8MoEMethod, TritonRunnerCore, fused_experts_none_to_triton), found
        assert (layer.w13_weight.dtype, layer.w13_weight_scale_inv.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert len(layers) == model.config.num_hidden_layers
    return f"{type(model).__name__}: {len(layers)} layers of experts in Triton"


def _check_weights_unchanged(process: Callable[..., None]) -> Callable[..., None]:
    def describe(layer: Any) -> dict[str, tuple[Any, ...]]:
        return {
            name: (weight.data_ptr(), weight._version, weight.dtype, weight.shape, weight.stride())
            for name, weight in layer.named_parameters()
        }

    def checked(method: Any, layer: Any) -> None:
        before = describe(layer)
        process(method, layer)
        after = describe(layer)
        assert after == before, f"{type(method).__name__} changed {before} to {after}"

    return checked


@check
def memory_saver() -> str:
    """Check that an engine's environment preloads torch_memory_saver's library, linked to the CUDA runtime that torch uses."""
    import torch
    from torch_memory_saver.utils import get_binary_path_from_package

    from megatron_rl.rollout.memory_saver import make_environment

    stubs = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    environment = stubs | make_environment(stubs, torch.version.cuda) | {"LD_PRELOAD": library, "LD_TRACE_LOADED_OBJECTS": "1"}
    loaded = subprocess.run(["/bin/true"], env=environment, capture_output=True, text=True).stdout
    assert library in loaded and "not found" not in loaded, loaded
    assert f"libcudart.so.13 => {SITE}" in loaded, loaded
    return "preloaded"


@check
def triton_kernels() -> str:
    """Compile every Triton kernel of this project for sm_90 as its own function launches it; check spills and registers."""
    import hopper_kernels

    return hopper_kernels.compile_all()


@check
def deep_gemm_kernels() -> str:
    """Compile one kernel of each recipe with the pinned nvcc."""
    nvcc = SITE / "nvidia" / "cu13" / "bin" / "nvcc"
    include = SITE / "deep_gemm" / "include"
    found = []
    for name, source in DEEP_GEMM_KERNELS.items():
        with tempfile.TemporaryDirectory() as folder:
            (file := Path(folder, "kernel.cu")).write_text(source)
            command = [str(nvcc), str(file), "-cubin", "-o", f"{folder}/kernel.cubin", f"-I{include}", *_NVCC_OPTIONS]
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        used = re.search(r"Used (\d+) registers", done.stderr)
        assert used and "0 bytes spill stores" in done.stderr, f"{name}: {done.stderr}"
        found.append(f"{name} {used[1]} registers")
    return ", ".join(found)


def _kernel(file: str, call: str) -> str:
    return f"#include <deep_gemm/impls/{file}.cuh>\nusing namespace deep_gemm;\nvoid *kernel = reinterpret_cast<void *>(&{call});\n"


DEEP_GEMM_KERNELS = {
    f"{recipe} {type}": _kernel(file, call.replace("TYPE", f"GemmType::{type}"))
    for recipe, file, call, types in (
        (
            "(1, 128, 128)",
            "sm90_fp8_gemm_1d2d",
            "sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 4096, 4096, 1, 128, 128, 128, 128, 128, 128, 5, 128, 256, 1, false, 132, "
            "TYPE, cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>",
            ("Normal", "MGroupedContiguous"),
        ),
        (
            "(1, 1, 128)",
            "sm90_fp8_gemm_1d1d",
            "sm90_fp8_gemm_1d1d_impl<4096, 4096, 0, 1, 128, 128, 128, 128, 128, 4, 128, 256, 1, false, 132, TYPE, float>",
            ("Normal", "KGroupedContiguous"),
        ),
    )
    for type in types
}
"""Recipe and kind of product -> source. The tile is one that DeepGEMM chooses for large products on an H100."""


def _has_extension() -> bool:
    folders = (SITE, SITE / "transformer_engine", SITE / "transformer_engine" / "wheel_lib")
    return any(True for folder in folders for _ in folder.glob("transformer_engine_torch*.so"))


def _add_part(part: Part) -> None:
    def collect() -> str:
        import pytest

        if not _has_extension():  # Megatron-Core imports Transformer Engine if it is installed
            sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        arguments = [*(f"tests/gpu/{test}" for test in part.tests), "-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider"]
        assert pytest.main(arguments) == 0
        return "collected"

    CHECKS[f"part-{part.name}"] = collect


for each in (WARM_UP, *PARTS):
    _add_part(each)


def run_in_this_process(name: str) -> None:
    """Run one check with the fake GPU and print its result last."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if name not in _BY_THEMSELVES:
        hopper.pretend()
    try:
        print(f"ok: {CHECKS[name]()}")
    except NotInstalledError as reason:
        print(f"skipped: {reason}")


def main(names: list[str]) -> int:
    failed = []
    if unknown := [name for name in names if name not in CHECKS]:
        print(f"{', '.join(unknown)}: is no check; the checks are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **hopper.build_stubs(Path(folder), SITE), "PYTHONPATH": str(ROOT)}
        for name in names or CHECKS:
            start = time.monotonic()
            command = [sys.executable, __file__, _ONLY, name]
            done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            results = [line for line in done.stdout.splitlines() if line.startswith(("ok: ", "skipped: "))]
            last = results[-1] if results and done.returncode == 0 else "FAILED"
            print(f"{name:32} {time.monotonic() - start:5.0f} s  {last}", flush=True)
            if last == "FAILED":
                failed.append(name)
                print("\n".join(done.stdout.splitlines()[-30:]), flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == [_ONLY]:
        run_in_this_process(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
