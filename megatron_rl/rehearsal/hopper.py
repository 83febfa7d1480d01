"""Answers queries about the GPU as if this machine had one Hopper or Blackwell GPU. Nothing can be computed.

`pretend` replaces the query functions of `torch.cuda` in this process. Compiled libraries query the driver and the CUDA runtime themselves,
so `build_stubs` compiles a libcuda.so.1 whose functions all fail, which lets the libraries load, and a library to preload that reports one
device.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.cost.hardware import Gpu

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    uuid="00000000-0000-0000-0000-000000000000",
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=False,
)
"""Result of torch.cuda.get_device_properties. `become` makes it another GPU's."""
_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": PROPERTIES,
    **dict.fromkeys(("init", "_lazy_init", "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
}
"""Function of torch.cuda -> its result for any arguments."""
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
_RUNTIME_ANSWERS = """
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaFree(void *pointer) { return 0; }
"""


def become(gpu: Gpu) -> None:
    """Make the pretended GPU this model. Libraries ask for its capability while they are imported."""
    PROPERTIES.name, PROPERTIES.total_memory, PROPERTIES.multi_processor_count = gpu.name, gpu.memory, gpu.processors
    PROPERTIES.major, PROPERTIES.minor = gpu.capability


def pretend(**functions: Any) -> None:
    """Make torch.cuda answer as with one GPU. `functions` are further functions of torch.cuda, or replace those here."""
    import torch

    total = PROPERTIES.total_memory
    functions = {
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": lambda *_: (total, total),
    } | functions
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, function in functions.items():
        setattr(torch.cuda, name, function)


def build_stubs(folder: Path, packages: Path) -> dict[str, str]:
    """Compile both libraries into `folder` for the libraries below `packages`. Return the environment variables that load them."""
    folder.mkdir(parents=True, exist_ok=True)
    driver, runtime = folder / "libcuda.so.1", folder / "libcudart_answers.so"
    symbols = find_driver_symbols(packages)
    _compile(driver, "".join(f"int {symbol}(void) {{ return {_NO_DEVICE}; }}\n" for symbol in sorted(symbols)))
    _compile(runtime, _RUNTIME_ANSWERS)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {"LD_LIBRARY_PATH": path, "LD_PRELOAD": str(runtime)}


def find_driver_symbols(packages: Path) -> set[str]:
    """Return the driver functions that libraries below a folder import."""
    symbols = set[str]()
    for library in _find_driver_users(packages):
        listed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, encoding="utf-8", check=True).stdout
        symbols |= set(re.findall(r"\bU (cu[A-Z]\w*)", listed))
    return {symbol for symbol in symbols if not re.match(r"cu(blas|dnn|rand|solver|sparse|fft|file)", symbol)}


def _find_driver_users(packages: Path) -> Iterator[Path]:
    libraries = [file for file in packages.rglob("*.so*") if file.is_file() and file.open("rb").read(4) == b"\x7fELF"]
    for library in libraries:
        if "libcuda.so.1" in subprocess.run(["readelf", "-d", str(library)], capture_output=True, encoding="utf-8", check=True).stdout:
            yield library


def _compile(library: Path, source: str) -> None:
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(command, input=source, encoding="utf-8", check=True)
