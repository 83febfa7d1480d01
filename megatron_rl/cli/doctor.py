"""`megatron-rl doctor`: what is installed, what each job of a run will use on this machine, what is missing and how to get it.

Versions come from package metadata, so no heavy package is imported; torch alone is, for what it knows of the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.cli.doctor_gpu import INSTALL, find_pitfalls, run_command
from megatron_rl.errors import UserError
from megatron_rl.kernels.linear import requirements
from megatron_rl.versions import find_version

TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "sglang": "0.5.23"}
"""The versions that the project's tests ran with. Hooks reach into private names of the last two: another version may break them."""

GPU_PINNED = {"torch": "2.14.1"}
"""Where the GPU tier's pins (launch/requirements-gpu.txt) differ from those: SGLang's kernels for CUDA are built for this torch."""

PYTHONS = ((3, 11), (3, 12))
SETUP = "bash launch/setup.sh"
NEEDED_PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "httpx",
    "math-verify",
    "datasets",
    "pyarrow",
    "tensorboard",
    "matplotlib",
)
_MIN_MEMORY_GIB = 4.0  # trainer and the engine's three processes hold about 1 GiB each
_STYLE = {"ok": "green", "warn": "yellow", "missing": "red", "": "default"}

Status = Literal["ok", "warn", "missing", ""]  # "" is a plain fact, or something that only a GPU run would want


@dataclass(frozen=True)
class DiagnosisRow:
    """One row: what was examined, what was found, and what to do about it. Only `missing` keeps the CPU tier from running."""

    name: str
    found: str
    status: Status = ""
    advice: str = ""


def print_diagnosis(console: Console | None = None) -> None:
    """Print the tables. Raise UserError, one line, where not even the CPU tier can run."""
    console = console or Console()
    machine = inspect_machine() + inspect_packages()
    for title, rows, heads in (
        ("This machine", machine, ("what", "found", "advice")),
        ("What a run will use here", describe_jobs(), ("job", "by", "note")),
        ("Pitfalls on the way to the GPU", inspect_pitfalls(), ("what", "found", "advice")),
    ):
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        for head in heads:
            table.add_column(head, overflow="fold")
        for row in rows:
            table.add_row(row.name, f"[{_STYLE[row.status]}]{escape(row.found)}[/]", row.advice)
        console.print(table)
    if missing := [row for row in machine if row.status == "missing"]:
        names = ", ".join(f"{row.name} ({row.found})" for row in missing)
        raise UserError("doctor", None, f"the CPU tier cannot run: {names}", missing[0].advice)
    console.print("The CPU tier can run: [bold]bash launch/quickstart.sh[/]")


def inspect_machine() -> list[DiagnosisRow]:
    """Return rows on Python, the processor, memory, disk, GPU and the project's commit."""
    python = DiagnosisRow("Python", platform.python_version(), "ok")
    if sys.version_info[:2] not in PYTHONS:
        supported = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        python = DiagnosisRow("Python", platform.python_version(), "missing", f"install Python {supported}, then {SETUP}")
    gib, gpu = find_memory_gib(), find_gpu()
    enough = gib >= _MIN_MEMORY_GIB
    return [
        python,
        DiagnosisRow("cores", str(len(os.sched_getaffinity(0)))),
        DiagnosisRow(
            "memory", f"{gib:.1f} GiB", "ok" if enough else "warn", "" if enough else f"the quickstart wants {_MIN_MEMORY_GIB:.0f} GiB"
        ),
        DiagnosisRow("disk here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free"),
        DiagnosisRow("GPU", gpu or "none", "", "" if gpu else "none is needed for the CPU tier"),
        DiagnosisRow("project commit", find_commit() or "not a git checkout"),
    ]


def inspect_packages() -> list[DiagnosisRow]:
    """Return rows on the packages that every run needs, then on those that only a GPU uses."""
    optional = [
        ("transformer-engine", "FP8 kernels of Megatron on NVIDIA GPUs", ("transformer-engine", "transformer_engine")),
        ("deep_gemm", "FP8 matrix products on Hopper and newer", ("deep-gemm", "deep_gemm", "sgl-deep-gemm")),
        ("triton", "SGLang's GPU kernels", ("triton",)),
    ]
    rows = [inspect_package(name) for name in NEEDED_PACKAGES]
    for name, use, names in optional:
        version = next(filter(None, map(find_version, names)), "not installed")
        rows.append(DiagnosisRow(name, version, "", f"GPU only: {use}"))
    return [*rows, inspect_apex()]


def describe_jobs() -> list[DiagnosisRow]:
    """Return rows on the code that does each job of a run on this machine."""
    on_gpu = bool(find_gpu()) and find_cuda_build() is not None
    engine = "SGLang's CUDA kernels" if on_gpu else "SGLang's CPU device, platform plug-in megatron_rl_cpu"
    note = "this project has not run its engine on a GPU yet" if on_gpu else "FP8 products emulated in torch, the trainer's own code"
    return [
        *inspect_backends(),
        DiagnosisRow("trainer's attention", "torch scaled_dot_product_attention"),
        DiagnosisRow("optimizer", "Megatron's optimizer over the project's fused-Adam stand-in", "", "float32 master weights"),
        DiagnosisRow("engine's kernels", engine, "", note),
        DiagnosisRow("engine's attention", "SGLang's default for this GPU" if on_gpu else "SGLang's torch_native back end"),
        DiagnosisRow("weight sync", "shared memory", "", "trainer and engine on one machine"),
    ]


def inspect_backends() -> list[DiagnosisRow]:
    """Return rows on the back ends of the trainer's FP8 linear layers: which this machine can run, and what the others lack."""
    rows = [DiagnosisRow("trainer's FP8 linears", "emulated, the default", "", "precision.backend names another")]
    for name in requirements.BACKENDS:
        missing = requirements.find_missing(name)
        advice = escape("; ".join(f"{requirement}: {fix}" for requirement, fix in missing))
        rows.append(DiagnosisRow(f"back end {name}", "cannot run here" if missing else "can run", "" if missing else "ok", advice))
    return rows


def inspect_pitfalls() -> list[DiagnosisRow]:
    """Return rows on what would fail late or compute something else on a GPU; none on a machine without a GPU's packages."""
    return [DiagnosisRow(name, found, "warn", escape(fix)) for name, found, fix in find_pitfalls(find_cuda_build(), find_driver())]


def inspect_package(name: str) -> DiagnosisRow:
    """Return the row of a package: installed and of the tested version, installed but of another one, or missing."""
    installed, cuda = find_version(name), find_cuda_build()
    if installed is None:
        return DiagnosisRow(name, "not installed", "missing", SETUP)
    version = installed.partition("+")[0]
    shown = f"{installed}, {f'CUDA {cuda}' if cuda else 'CPU build'}" if name == "torch" else installed
    pinned = GPU_PINNED.get(name) if cuda else None
    if version == pinned:
        return DiagnosisRow(name, shown, "ok", "pinned for the GPU tier, which no test has run on yet")
    if pinned:
        return DiagnosisRow(name, shown, "warn", f"pinned is {pinned}: {INSTALL}")
    if version != TESTED.get(name, version):
        return DiagnosisRow(name, shown, "warn", f"tested with {TESTED[name]}: {SETUP}")
    return DiagnosisRow(name, shown, "ok")


def inspect_apex() -> DiagnosisRow:
    """Return the row of apex: NVIDIA's has GPU optimizers; the `apex` on PyPI is an unrelated web toolkit."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return DiagnosisRow("apex", "not installed", "", "GPU only: fused weight gradients; PyPI's `apex` is something else")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if any((folder / part).is_dir() for folder in folders for part in ("optimizers", "normalization")):
        return DiagnosisRow("apex", f"NVIDIA's, {find_version('apex') or 'version unknown'}", "ok")
    return DiagnosisRow(
        "apex", "PyPI's web toolkit, not NVIDIA's", "warn", "pip uninstall apex; build NVIDIA's from github.com/NVIDIA/apex"
    )


def find_memory_gib() -> float:
    """Return the memory of the machine, or of the container where that is less, in GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or the text "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return float(total) / 2**30


def find_gpu() -> str | None:
    """Return name, memory and driver of the NVIDIA GPUs; None without one."""
    return "; ".join(_query_gpus()) or None


def find_driver() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    return _query_gpus()[0].rpartition(", ")[2] if _query_gpus() else None


@functools.cache
def _query_gpus() -> list[str]:
    """Return "name, memory, driver" of each GPU, as nvidia-smi reports them."""
    return (run_command("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader") or "").splitlines()


def find_commit() -> str | None:
    """Return the short commit of the checkout that this file belongs to, `+changes` with uncommitted ones; None outside of git."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").exists():  # an installed wheel: an enclosing checkout is another project's
        return None
    if (short := run_command("git", "-C", str(root), "rev-parse", "--short", "HEAD")) is None:
        return None
    return short + ("+changes" if run_command("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") else "")


def find_cuda_build() -> str | None:
    """Return the CUDA version that torch was built for; None for a CPU build or no torch."""
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda
