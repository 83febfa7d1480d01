"""Stand-ins for the packages of a GPU's environment, whose import loads CUDA's driver: an OSError where there is none."""

from __future__ import annotations

from pathlib import Path

PACKAGES = ("flashinfer", "flash_mla", "sgl_kernel", "deep_gemm", "transformer_engine")


def install(folder: Path) -> str:
    """Write them below a folder; return it, for PYTHONPATH."""
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text('import ctypes\n\nctypes.CDLL("no-driver/libcuda.so.1")\n')
    return str(folder)
