"""Which sources decide what tests of kernels find. Tests marked `kernels` compile for a GPU or run in Triton's interpreter, which takes
minutes. The default tests run them only if these sources differ from those with which all of them passed last.

    .venv/bin/python -m pytest -n 2 -m kernels tests/unit --record-kernels      # run all of them, and record the sources if they pass
"""

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "unit" / "kernels" / "passed.sha256"
SOURCES = (
    "megatron_rl/kernels/**/*.py",
    "parallel/formats.py",
    "parallel/formats/*.py",
    "launch/requirements-gpu.txt",  # names Triton's version
    "tools/compile_kernels*.py",
    "tools/kernel_*.py",
    "tests/unit/kernels/**/*.py",
    "tests/unit/tools/test_kernel_*.py",
    "tests/support/kernel_tests.py",
)


@cache
def hash_sources() -> str:
    files = sorted({file for pattern in SOURCES for file in ROOT.glob(pattern)})
    parts = (f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() for file in files)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def have_passed() -> bool:
    """Return whether the tests of kernels have passed with these sources."""
    return RECORD.is_file() and RECORD.read_text(encoding="utf-8").strip() == hash_sources()


def record() -> None:
    RECORD.write_text(hash_sources() + "\n", encoding="utf-8")
