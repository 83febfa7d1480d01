"""The command `doctor`: shows installed versions, the code that a run uses on this machine, and what is missing.

Versions are read from package metadata. Only torch is imported, for its CUDA version.
"""

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
from megatron_rl.kernels.blackwell import is_blackwell
from megatron_rl.kernels.linear import requirements
from megatron_rl.versions import find_install_command, find_version

TESTED = {"torch": "2.13.0", "megatron-core": "0.19.2", "sglang": "0.5.23"}
"""Versions that the project's tests use. The project depends on private names of megatron-core and sglang, so others may fail."""
GPU_PINNED = {"torch": "2.14.1"}
"""Pins of the GPU tier (launch/requirements-gpu.txt) that differ from `TESTED`: SGLang's CUDA kernels are built for this torch."""
PYTHONS = ((3, 11), (3, 12))
NEEDED_PACKAGES = (
    *("torch", "megatron-core", "sglang", "transformers", "tokenizers", "safetensors", "pydantic"),
    *("httpx", "math-verify", "datasets", "pyarrow", "tensorboard", "matplotlib"),
)
_MIN_MEMORY_GIB = 4.0  # the trainer and the three engine processes use about 1 GiB each
_STYLE = {"ok": "green", "warn": "yellow", "missing": "red", "": "default"}

Status = Literal["ok", "warn", "missing", ""]  # "" for plain information; only "missing" prevents runs in the CPU tier


@dataclass(frozen=True)
class DiagnosisRow:
    name: str
    found: str
    status: Status = ""
    advice: str = ""


def print_diagnosis(console: Console | None = None) -> None:
    """Print the tables. Raise UserError if not even the CPU tier can run."""
    console = console or Console()
    machine = inspect_machine() + inspect_packages()
    for title, rows, heads in (
        ("This machine", machine, ("what", "found", "advice")),
        ("What a run will use here", describe_jobs(), ("job", "by", "note")),
        ("Problems for GPU runs", inspect_pitfalls(), ("what", "found", "advice")),
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
    """Return rows for Python, the CPU, memory, disk, GPU and the project's commit."""
    supported, gib, gpu = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS), find_memory_gib(), find_gpu()
    known, enough = sys.version_info[:2] in PYTHONS, gib >= _MIN_MEMORY_GIB
    python_advice = "" if known else f"install Python {supported}, then {find_install_command()}"
    memory_advice = "" if enough else f"the quickstart needs {_MIN_MEMORY_GIB:.0f} GiB"
    return [
        DiagnosisRow("Python", platform.python_version(), "ok" if known else "missing", python_advice),
        DiagnosisRow("cores", str(len(os.sched_getaffinity(0)))),
        DiagnosisRow("memory", f"{gib:.1f} GiB", "ok" if enough else "warn", memory_advice),
        DiagnosisRow("disk space", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free"),
        DiagnosisRow("GPU", gpu or "none", "", "" if gpu else "the CPU tier needs none"),
        DiagnosisRow("project commit", find_commit() or "not a git checkout"),
    ]


def inspect_packages() -> list[DiagnosisRow]:
    """Return rows for the packages that every run needs, then for packages that only GPU runs use."""
    rows = [inspect_package(name) for name in NEEDED_PACKAGES]
    for name, use, names in (
        ("transformer-engine", "FP8 kernels of Megatron on NVIDIA GPUs", ("transformer-engine", "transformer_engine")),
        ("deep_gemm", "FP8 matrix products on Hopper and newer", ("deep-gemm", "deep_gemm", "sgl-deep-gemm")),
        ("triton", "SGLang's GPU kernels", ("triton",)),
    ):
        rows.append(DiagnosisRow(name, next(filter(None, map(find_version, names)), "not installed"), "", f"GPU only: {use}"))
    return [*rows, inspect_apex()]


def describe_jobs() -> list[DiagnosisRow]:
    """Return rows for the code that performs each job of a run on this machine."""
    on_gpu = bool(find_gpu()) and find_cuda_build() is not None
    engine = "SGLang's CUDA kernels" if on_gpu else "SGLang's CPU device, platform plug-in megatron_rl_cpu"
    attention = "SGLang's torch_native back end"
    if on_gpu:
        attention = "Triton's on Blackwell" if is_blackwell() else "SGLang's default for this GPU"
    note = "little tested on GPUs so far" if on_gpu else "FP8 matrix products are emulated in torch with the trainer's code"
    return [
        DiagnosisRow("trainer's FP8 linears", "emulated by default", "", "set precision.backend to use another back end"),
        *map(inspect_backend, requirements.BACKENDS),
        DiagnosisRow("engine's kernels", engine, "", note),
        DiagnosisRow("engine's attention", attention),
    ]


def inspect_backend(name: str) -> DiagnosisRow:
    missing = requirements.find_missing(name)
    advice = escape("; ".join(f"{requirement}: {fix}" for requirement, fix in missing))
    return DiagnosisRow(f"back end {name}", "cannot run here" if missing else "can run", "" if missing else "ok", advice)


def inspect_pitfalls() -> list[DiagnosisRow]:
    """Return rows for problems that would cause late failures or wrong results on a GPU."""
    return [DiagnosisRow(name, found, "warn", escape(fix)) for name, found, fix in find_pitfalls(find_cuda_build(), find_driver())]


def inspect_package(name: str) -> DiagnosisRow:
    """Return the row of a package: whether it is installed and has the tested version."""
    installed, cuda = find_version(name), find_cuda_build()
    if installed is None:
        return DiagnosisRow(name, "not installed", "missing", find_install_command())
    version = installed.partition("+")[0]
    shown = f"{installed}, {f'CUDA {cuda}' if cuda else 'CPU build'}" if name == "torch" else installed
    pinned = GPU_PINNED.get(name) if cuda else None
    if version == pinned:
        return DiagnosisRow(name, shown, "ok", "pinned for the GPU tier")
    if pinned:
        return DiagnosisRow(name, shown, "warn", f"the pinned version is {pinned}: {INSTALL}")
    if version != TESTED.get(name, version):
        return DiagnosisRow(name, shown, "warn", f"tested with {TESTED[name]}: {find_install_command()}")
    return DiagnosisRow(name, shown, "ok")


def inspect_apex() -> DiagnosisRow:
    """Return the row of NVIDIA's apex. The package `apex` on PyPI is an unrelated web toolkit."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return DiagnosisRow("apex", "not installed", "", "GPU only: fused weight gradients; not the package `apex` on PyPI")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if any((folder / part).is_dir() for folder in folders for part in ("optimizers", "normalization")):
        return DiagnosisRow("apex", f"NVIDIA's, {find_version('apex') or 'version unknown'}", "ok")
    advice = "pip uninstall apex, then build NVIDIA's from github.com/NVIDIA/apex"
    return DiagnosisRow("apex", "PyPI's web toolkit, not NVIDIA's", "warn", advice)


def find_memory_gib() -> float:
    """Return the memory of the machine or the limit of the container, whichever is less, in GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return float(total) / 2**30


def find_gpu() -> str | None:
    """Return name, memory and driver of the NVIDIA GPUs, or None without a GPU."""
    return "; ".join(_query_gpus()) or None


def find_driver() -> str | None:
    return _query_gpus()[0].rpartition(", ")[2] if _query_gpus() else None


@functools.cache
def _query_gpus() -> list[str]:
    return (run_command("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader") or "").splitlines()


def find_commit() -> str | None:
    """Return the short commit of the project, with `+changes` if files are modified, or None outside of git."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").exists():  # in an installed wheel, a surrounding checkout would belong to another project
        return None
    if (short := run_command("git", "-C", str(root), "rev-parse", "--short", "HEAD")) is None:
        return None
    return short + ("+changes" if run_command("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") else "")


def find_cuda_build() -> str | None:
    """Return the CUDA version that torch was built for, or None for a CPU build or without torch."""
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda
