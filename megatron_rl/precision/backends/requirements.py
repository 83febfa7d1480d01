"""What each backend needs of a machine and of a model, told before anything heavy starts. No torch unless a GPU backend is asked for."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import BLOCK
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards, compute_row_order
from parallel.model_geometry import ModelGeometry

BACKENDS = ("emulated", "transformer_engine", "deep_gemm")
MIN_CUDA = (12, 9)
"""From here on cuBLAS has block-scaled products, and nvcc compiles DeepGEMM's kernels."""
_HOPPER = 9
"""Major compute capability. Newer GPUs compute 128-blocks by requantising them to MXFP8: other bytes than the engine's."""


@dataclass(frozen=True)
class Package:
    """A package under one of the names it is published as, with the versions its backend was written against, last one excluded."""

    name: str
    first: tuple[int, ...]
    after: tuple[int, ...]
    get: str


_PACKAGES: dict[str, tuple[tuple[Package, ...], ...]] = {  # every tuple of alternatives must have one
    "emulated": (),
    "deep_gemm": (
        (
            Package("sgl-deep-gemm", (0, 2, 3), (0, 3), "pip install sgl-deep-gemm==0.2.3.post2"),
            Package("deep_gemm", (2, 1), (2, 7), "build it from github.com/deepseek-ai/DeepGEMM"),
        ),
        (Package("triton", (3, 2), (4,), "install torch's CUDA build, which brings Triton"),),
    ),
    "transformer_engine": (
        (Package("transformer-engine", (2, 12), (2, 21), "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.12,<2.21'"),),
    ),
}


def find_missing(name: str) -> list[tuple[str, str]]:
    """(what keeps the backend from running on this machine, how to get it), the most important first; empty where it can run."""
    if name == "emulated":
        return []
    wants = [_gpu(), *map(_package, _PACKAGES[name])]
    if name == "deep_gemm" and find_nvcc() is None:
        wants.append(("no nvcc to compile its kernels", "install the CUDA toolkit and set CUDA_HOME"))
    return [want for want in wants if want]


def check_machine(precision: PrecisionConfig) -> None:
    """Raises UserError where `precision.backend` cannot run here, or not in this precision."""
    name = precision.backend
    if precision.mode != "fp8_unified" or name == "emulated":
        return
    if precision.high != "bf16":
        raise UserError("precision.high", precision.high, f"is not what backend {name} computes", "use bf16, or precision.backend emulated")
    if lacks := find_missing(name):
        rule = "cannot run here: " + ", ".join(what for what, _ in lacks)
        raise UserError("precision.backend", name, rule, "; ".join([fix for _, fix in lacks] + ["or use emulated"]))


def check_model(precision: PrecisionConfig, model: ModelGeometry, layout: Layout) -> None:
    """Raises UserError where a rank's FP8 weight is cut or reordered within a block, which only `emulated` can compute with."""
    if precision.mode != "fp8_unified" or precision.backend == "emulated":
        return
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        for shard in build_megatron_shards(model, layout, place):
            if shard.role not in QUANTIZED_ROLES:
                continue
            rows = shard.rows // max(shard.experts, 1)
            if rows % BLOCK or shard.cols % BLOCK:
                rule = f"needs widths in multiples of {BLOCK}, and {shard.name} is [{rows}, {shard.cols}] on rank {rank}"
            elif shard.name.endswith("linear_qkv.weight") and compute_row_order(model, layout, place, shard.name) is not None:
                rule = f"needs blocks that hold one of q, k and v each, and those of {shard.name} would mix them on rank {rank}"
            else:
                continue
            raise UserError("precision.backend", precision.backend, rule, "use emulated, or another train.layout.tp")


def _gpu() -> tuple[str, str] | None:
    import torch

    fix = "run it on a Hopper GPU (H100, H200) with CUDA 12.9 or newer"
    if torch.version.cuda is None:
        return "torch is a CPU build", f"install torch's CUDA build and {fix}"
    if not torch.cuda.is_available():
        return "torch sees no GPU", fix
    if torch.cuda.get_device_capability()[0] != _HOPPER:
        return f"{torch.cuda.get_device_name()} is no Hopper GPU", fix
    if parse_version(torch.version.cuda) < MIN_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}", fix
    return None


def _package(alternatives: tuple[Package, ...]) -> tuple[str, str] | None:
    found = [(package, version) for package in alternatives if (version := _version(package.name))]
    if not found:
        return f"{alternatives[0].name} is not installed", alternatives[0].get
    package, version = found[0]
    if package.first <= parse_version(version) < package.after:
        return None
    known = f"{'.'.join(map(str, package.first))} to below {'.'.join(map(str, package.after))}"
    return f"{package.name} {version} is not one of the known versions, {known}", package.get


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_version(version: str) -> tuple[int, ...]:
    """(2, 6, 1) of "2.6.1+54e2261"."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d|", version).group().split(".") if part)  # type: ignore[union-attr]


def find_nvcc() -> str | None:
    """CUDA_HOME or CUDA_PATH where it holds bin/nvcc, else the nvcc on PATH."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return next((home for home in homes if home and (Path(home) / "bin" / "nvcc").exists()), shutil.which("nvcc"))
