"""Checks of the GPU code against the pinned packages, on a machine without a GPU. tools/gpu_packages.sh installs them and runs this file.

    python tools/gpu_packages.py            # all checks, each in its own process with a fake Hopper GPU; exit code 1 if one fails
    python tools/gpu_packages.py NAME ...   # only these checks

The checks import, hook, compare, and compile real code. Nothing is computed.
"""

import ctypes
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
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from gpu_parts import PARTS, WARM_UP, Part

from megatron_rl.rehearsal import hopper

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])
_ONLY = "--in-this-process"


CHECKS: dict[str, Callable[[], str]] = {}
"""Name -> check. A check returns a short summary and raises if it fails."""


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


@check
def packages() -> str:
    """Run `pip check`."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, encoding="utf-8")
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
def signatures() -> str:
    """Compare the parameters of library functions with those of the shape functions that replace them in a rehearsal, and the parameters
    of torch's `varlen_attn` with the arguments that are passed to it."""
    from torch.nn.attention.varlen import varlen_attn

    from megatron_rl.rehearsal.kernels import deep_gemm, flash_attention, transformer_engine
    from megatron_rl.rehearsal.signatures import LIBRARIES, compare, is_installed
    from rollout_sglang.rehearsal.kernels import flashinfer, sgl_kernel

    assert all(map(is_installed, LIBRARIES))
    kernels = deep_gemm.STANDS_FOR | transformer_engine.STANDS_FOR | sgl_kernel.STANDS_FOR | flashinfer.STANDS_FOR
    assert not (wrong := compare(kernels) + compare(flash_attention.STANDS_FOR)), "\n".join(wrong)
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"]
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert [name for name in parameters if name in names] == names, f"varlen_attn{parameters}"
    return f"{len(kernels) + 2} functions"


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
def attention_blocks() -> str:
    """Check in the names of FlashAttention 3's kernels that causal BF16 attention of packed sequences, with and without pages, adds keys in
    blocks of one size for each head width that `precision.reduction = "ranks"` supports."""
    from megatron_rl.kernels.attention.requirements import HEAD_WIDTHS

    demangle, blocks = ctypes.CDLL("libstdc++.so.6").__cxa_demangle, defaultdict[int, Counter[int]](Counter)
    demangle.restype = ctypes.c_char_p
    (library,) = (SITE / "sgl_kernel").glob("flash_ops*.so")
    tile = r"FwdSm90<.*?, cute::tuple<cute::C<\d+>, cute::C<(\d+)>, cute::C<(\d+)> >, \d+, cutlass::bfloat16_t, float, "
    causal = "cutlass::arch::Sm90, true, false, false, true, "  # causal, local, capped, packed
    for name in set(re.findall(rb"_ZN\w+FlashAttnFwdSm90\w+", library.read_bytes())):
        if found := re.search(tile + causal, demangle(name, None, None, None).decode()):
            blocks[int(found[2])][int(found[1])] += 1
    assert all(blocks[width].keys() == {128} for width in HEAD_WIDTHS), blocks
    return f"{sum(blocks[width][128] for width in HEAD_WIDTHS)} kernels"


@check
def memory_saver() -> str:
    """Check that an engine's environment preloads torch_memory_saver's library, linked to the CUDA runtime that torch uses."""
    import torch
    from torch_memory_saver.utils import get_binary_path_from_package

    from megatron_rl.rollout.memory_saver import make_environment

    stubs = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    environment = stubs | make_environment(stubs, torch.version.cuda) | {"LD_PRELOAD": library, "LD_TRACE_LOADED_OBJECTS": "1"}
    loaded = subprocess.run(["/bin/true"], env=environment, capture_output=True, encoding="utf-8").stdout
    assert library in loaded and "not found" not in loaded, loaded
    assert f"libcudart.so.13 => {SITE}" in loaded, loaded
    return "preloaded"


@check
def triton_kernels() -> str:
    """Compile every Triton kernel of this project for sm_90 as its own function launches it, and check for register spills."""
    import compile_kernels

    return compile_kernels.compile_all(90)


@check
def triton_kernels_blackwell() -> str:
    """Do the same for sm_100 (B200, GB200)."""
    import compile_kernels

    return compile_kernels.compile_all(100)


@check
def triton_kernels_b300() -> str:
    """Do the same for sm_103, whose kernels Triton compiles anew."""
    import compile_kernels

    return compile_kernels.compile_all(103)


def _add_part(part: Part) -> None:
    def collect() -> str:
        import pytest

        sys.modules["transformer_engine"] = None  # type: ignore[assignment] # Megatron-Core would import it, and its extension is missing
        arguments = [*(f"tests/gpu/{test}" for test in part.tests), "-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider"]
        assert pytest.main(arguments) == 0
        return "collected"

    CHECKS[f"part-{part.name}"] = collect


for each in (WARM_UP, *PARTS):
    _add_part(each)


def run_in_this_process(name: str) -> None:
    """Run one check with the fake GPU and print its result last."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    hopper.pretend()
    print(f"ok: {CHECKS[name]()}")


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
            done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
            results = [line for line in done.stdout.splitlines() if line.startswith("ok: ")]
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
