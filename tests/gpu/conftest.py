"""The GPU check: `bash tools/gpu_check.sh` runs this folder with `-m gpu`, in parts, for JUnit's reports and pytest-benchmark's figures.

Tests take a `device`: "cuda" with real libraries and sizes, marked `gpu`, or "cpu" with tiny sizes and stand-in libraries, so that the code
of the check is executed on machines without a GPU too. Tests that measure use `figures`; they run after those that only check.
"""

import importlib.metadata
import subprocess

import pytest
import torch
from support import fake_gpu_libraries

from megatron_rl.kernels.linear import make_backend, requirements

TO_BEAT = {
    **{"actor update of 8B": 1.35, "reference forward of 8B": 1.50, "actor update of 32B": 1.54, "reference forward of 32B": 1.80},
    **{"rollout of 32B": 1.33, "sync": 0.80},
}
"""Speed over BF16: for 8B goals (the rates of benchmarks/h200 allow 1.28 and 1.50), and what Jet-RL reports (arXiv 2601.14243, for a model
of 8B, here asked of 32B). Of the sync, the share of a device copy's speed."""
GPU_SECONDS = 135
"""Time limit of a test on a GPU that has none of its own; tools/gpu_check.sh limits its parts."""
_PACKAGES = ("torch", "triton", "megatron-core", "sglang", "sglang-kernel", "sgl-deep-gemm", "transformer-engine", "flashinfer-python")
_verdicts = pytest.StashKey()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "figures" in getattr(item, "fixturenames", ()))
    for item in items:
        if "figures" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.long)  # a speed on a CPU says nothing; the long tests run its code
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_SECONDS))


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request):
    return request.param


@pytest.fixture
def backends(device, monkeypatch):
    """The GPU back ends that this machine can run; on a CPU both, with stand-ins for their libraries."""
    names = ["deep_gemm", "transformer_engine"]
    if device == "cpu":
        fake_gpu_libraries.install(monkeypatch)
    else:
        names = [name for name in names if not requirements.find_missing(name)]
    make_backend.cache_clear()  # no back end keeps a stand-in
    yield names
    make_backend.cache_clear()


class Figures:
    """Writes figures into pytest-benchmark's JSON, below `extra_info` of the test."""

    def __init__(self, benchmark, verdicts):
        self.measure = benchmark.pedantic
        """`measure(function, args=..., kwargs=...)` runs it once and returns its result."""
        self.values = benchmark.extra_info
        self._verdicts = verdicts

    def add(self, name, target="", reached=0.0, **values):
        """Add a figure. With a `target` that TO_BEAT has, also whether `reached` meets it; what does not is no fault."""
        if target in TO_BEAT:
            met = reached >= TO_BEAT[target]
            values |= {"target": target, "reached": reached, "to_beat": TO_BEAT[target], "met": met}
            self._verdicts.append(f"{target}: {reached:.2f} ({name}); to beat {TO_BEAT[target]:.2f}: {'met' if met else 'not met'}")
        self.values[name] = values

    def add_seconds(self, name, seconds, target="", **values):
        """Add a figure for every case of `seconds` with its speed against the fastest BF16 that ran; FP8's is held against `target`."""
        bf16 = [value for case, value in seconds.items() if case.startswith("bf16")]
        for case, value in seconds.items():
            ratio = min(bf16) / value if bf16 else None
            held_against = {"target": target, "reached": ratio} if target and ratio and not case.startswith("bf16") else {}
            self.add(f"{name}, {case}", **held_against, seconds=value, of_bf16=ratio, **values)


@pytest.fixture
def figures(benchmark, request):
    return Figures(benchmark, request.config.stash.setdefault(_verdicts, []))


def pytest_terminal_summary(terminalreporter, config):
    """Print what back ends lack and the figures to beat; those of a CPU say nothing."""
    if torch.cuda.is_available():
        lacks = [(name, *lack) for name in ("deep_gemm", "transformer_engine") for lack in requirements.find_missing(name)]
        lines = [f"left out, back end {name}: {what}; {fix}" for name, what, fix in lacks]
        terminalreporter.write_line("\n".join(lines + config.stash.get(_verdicts, [])))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info):
    """Add the GPU, its driver and the versions of what is measured."""
    if torch.cuda.is_available():
        machine_info["gpu"] = torch.cuda.get_device_name()
        machine_info["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        machine_info["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    machine_info["cuda"] = torch.version.cuda
    distributions = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    machine_info["packages"] = {name: distributions[name] for name in _PACKAGES if name in distributions}
