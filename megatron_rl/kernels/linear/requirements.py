"""Requirements of each backend on machine and model, checked before anything heavy starts. Imports torch only for GPU backends."""

import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.kernels.linear import PRODUCTS
from megatron_rl.kernels.linear.base import ROW_MULTIPLE
from megatron_rl.precision.contract import QUANTIZED_ROLES
from megatron_rl.versions import find_version
from parallel.formats import FP8, TensorFormat
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards, reorder_for_quantization
from parallel.model_geometry import ModelGeometry
from parallel.shards import find_misaligned_region

BACKENDS = ("emulated", "transformer_engine", "deep_gemm")
MIN_CUDA = (12, 9)  # first version in which cuBLAS has block-scaled products and nvcc compiles DeepGEMM's kernels
_GPUS = (9, 10)  # major compute capabilities: Hopper, and Blackwell for data centers, which applies only powers of two as scales


@dataclass(frozen=True)
class Package:
    """A package under one of its published names, supported from `min_version` to below `max_version`."""

    name: str
    min_version: tuple[int, ...]
    max_version: tuple[int, ...]
    install_hint: str


PINNED_DEEP_GEMM = "pip install sgl-deep-gemm==0.2.3.post2"
_TRITON = (Package("triton", (3, 7), (4,), "install torch's CUDA build, which brings Triton"),)
_PACKAGES: dict[str, tuple[tuple[Package, ...], ...]] = {  # one of each tuple of alternatives must be installed
    "emulated": (),
    "deep_gemm": (
        (
            Package("sgl-deep-gemm", (0, 2, 3), (0, 3), PINNED_DEEP_GEMM),
            Package("deep_gemm", (2, 1), (2, 7), "build it from github.com/deepseek-ai/DeepGEMM"),
        ),
        _TRITON,
    ),
    "transformer_engine": (
        (Package("transformer-engine", (2, 12), (2, 21), "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.12,<2.21'"),),
        _TRITON,
    ),
}


def find_missing(name: str, format: TensorFormat = FP8, experts: bool = False) -> list[tuple[str, str]]:
    """Return pairs (reason why the backend cannot run on this machine, fix), the most important first. Empty if it can run. `experts`:
    whether the model has experts, whose products are DeepGEMM's (`kernels.experts.backends.GROUPED`)."""
    if (format.name, name) not in PRODUCTS:
        return [(f"it has no {format.name.upper()} products", "name another")]
    if name == "emulated":
        return []
    deep_gemm = name == "deep_gemm" or experts
    packages = dict.fromkeys((*_PACKAGES[name], *(_PACKAGES["deep_gemm"] if experts else ())))
    missing = [_find_gpu_problem(), *map(_find_package_problem, packages)]
    if deep_gemm and find_nvcc() is None:
        missing.append(("no nvcc to compile its kernels", "install the CUDA toolkit and set CUDA_HOME"))
    return [problem for problem in missing if problem]


def has_deterministic_mode() -> bool:
    """Return whether the installed DeepGEMM can be asked whether its BF16 products have one order of sums for any number of rows."""
    spec = importlib.util.find_spec("deep_gemm")
    return spec is not None and "get_deterministic_algorithms" in Path(spec.origin or "").read_text(encoding="utf-8")


def find_triton_problem() -> tuple[str, str] | None:
    """Return (reason why this project's Triton kernels, which every mode uses on a GPU, cannot be compiled here, fix), or None."""
    return _find_package_problem(_TRITON)


def check_model(backend: str, format: TensorFormat, model: ModelGeometry, layout: Layout) -> None:
    """Raise UserError if a rank's quantized weight is cut within a block, which only `emulated` supports. The last rows of a weight that
    gives queries, keys or values may be a partial block, as in latent attention (`kernels.linear.base.GpuBackend`)."""
    if format.block is None or backend == "emulated" or not (rule := _find_mixed_block(format, model, layout)):
        return
    works = [str(tp) for tp in range(1, layout.tp) if model.shares_heads(tp) and not _find_mixed_block(format, model, Layout(tp=tp))]
    other = f"train.layout.tp = {' or '.join(works)}" if works else "train in BF16 (precision.mode = fp8_rollout or bf16)"
    raise UserError("precision.backend", backend, rule, f"use emulated, or {other}")


def _find_mixed_block(format: TensorFormat, model: ModelGeometry, layout: Layout) -> str:
    width = max(format.block or (1,))
    for rank in range(layout.world_size):
        for shard in build_megatron_shards(model, layout, layout.coordinates(rank)):
            if shard.role not in QUANTIZED_ROLES:
                continue
            rows = shard.rows // max(shard.experts, 1)
            multiple = ROW_MULTIPLE if shard.role == "attention_qkv" else width
            if rows % multiple or shard.cols % width:
                return f"needs widths in multiples of {width}, and {shard.name} is [{rows}, {shard.cols}] on rank {rank}"
            reordered = reorder_for_quantization(shard, format)
            if reordered is not shard and find_misaligned_region(reordered, format) is not None:
                return f"needs blocks of only one of q, k and v, but those of {shard.name} would mix them on rank {rank}"
    return ""


def _find_gpu_problem() -> tuple[str, str] | None:
    fix = "run it on a Hopper or Blackwell GPU (H100, H200, B200, GB200, B300) with CUDA 12.9 or newer"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed", fix
    import torch

    if torch.version.cuda is None:
        return "torch is a CPU build", f"install torch's CUDA build and {fix}"
    if not torch.cuda.is_available():
        return "torch sees no GPU", fix
    if torch.cuda.get_device_capability()[0] not in _GPUS:
        return f"{torch.cuda.get_device_name()} is neither a Hopper nor a Blackwell GPU for data centers", fix
    if parse_version(torch.version.cuda) < MIN_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}", fix
    return None


def _find_package_problem(alternatives: tuple[Package, ...]) -> tuple[str, str] | None:
    installed = [(package, version) for package in alternatives if (version := find_version(package.name))]
    if not installed:
        return f"{alternatives[0].name} is not installed", alternatives[0].install_hint
    package, version = installed[0]
    if package.min_version <= parse_version(version) < package.max_version:
        return None
    supported = f"{'.'.join(map(str, package.min_version))} to below {'.'.join(map(str, package.max_version))}"
    return f"{package.name} {version} is not a supported version, {supported}", package.install_hint


def parse_version(version: str) -> tuple[int, ...]:
    """Return (2, 6, 1) for "2.6.1+54e2261"."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d|", version).group().split(".") if part)  # type: ignore[union-attr]


def find_nvcc() -> str | None:
    """Return CUDA_HOME or CUDA_PATH if it contains bin/nvcc, else the nvcc on PATH, or None if there is none."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return next((home for home in homes if home and (Path(home) / "bin" / "nvcc").exists()), shutil.which("nvcc"))
