"""The digest of bytes on a GPU: its kernel sums as a plain loop over words does, in Triton's interpreter here; every change changes it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.fp8_reference import run_sums

from parallel.digest import Hash

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: GPU builds of torch bring it"
)

CASES = """
import torch
from parallel.digest_triton import run_sums
from support import fp8_reference as device_sums

generator = torch.Generator().manual_seed(0)
for size in (0, 1, 3, 4, 4096, 4097, 256 << 10, (256 << 10) + 4, 600_001):
    flat = torch.randint(0, 256, (size + 4,), dtype=torch.uint8, generator=generator)
    for start in (0, 1, 4):  # also off the alignment of a word
        assert torch.equal(run_sums(flat[start : start + size]), device_sums.run_sums(flat[start : start + size])), (size, start)
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from parallel.digest_triton import COLUMNS, RUN, sum_runs as kernel

fixed = {(3,): COLUMNS, (4,): RUN}
signature = {"words": "*i32", "sums": "*i64", "count": "i32", "COLUMNS": "constexpr", "RUN": "constexpr"}
source = ASTSource(kernel, signature, fixed, {(number,): [["tt.divisibility", 16]] for number in range(3)})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
assert "ld.global.v4.b32" in ptx, "loads word by word"
"""


def run(code: str, **environment: str) -> None:
    """In a process of its own: the interpreter is chosen when Triton is first imported."""
    root = Path(__file__).resolve().parents[3]
    environment |= {"PYTHONPATH": ":".join([str(root), str(root / "tests"), *sys.path]), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.slow
def test_the_kernels_sums_are_those_of_a_plain_loop():
    run(CASES, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_it_compiles_for_hopper_with_wide_loads(tmp_path):
    """Needs no GPU: Triton brings its own assembler."""
    run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.fixture
def on_device(monkeypatch):
    """Byte matrices that are tensors are hashed as on a GPU, by the plain loop."""
    stand_in = ModuleType("parallel.digest_triton")
    stand_in.run_sums = run_sums
    monkeypatch.setitem(sys.modules, "parallel.digest_triton", stand_in)


def hashed(*matrices: torch.Tensor) -> str:
    found = Hash()
    for matrix in matrices:
        found.update(matrix)
    return found.hexdigest()


def test_every_kind_of_change_changes_the_digest(on_device):
    matrix = torch.randint(0, 256, (150, 2048), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    told = {"as it is": hashed(matrix)}
    for name, place in {"first": (0, 0), "in between": (77, 1025), "last": (149, 2047)}.items():
        for bit in (0, 7):
            changed = matrix.clone()
            changed[place] ^= 1 << bit
            told[f"{name} byte, bit {bit}"] = hashed(changed)
    swaps = {"rows two apart": (3, 5), "rows far apart": (0, 130)}  # within a column of a run; from one run to another
    for name, (one, other) in swaps.items():
        changed = matrix.clone()
        changed[[one, other]] = matrix[[other, one]]
        told[name] = hashed(changed)
    told["a zero row more"] = hashed(torch.cat([matrix, matrix.new_zeros(1, 2048)]))
    told["in two pieces"] = hashed(matrix[:75], matrix[75:])
    told["the pieces swapped"] = hashed(matrix[75:], matrix[:75])
    assert len(set(told.values())) == len(told), told
    assert all(len(value) == 32 for value in told.values())


def test_columns_of_a_tensor_are_hashed_as_their_copy(on_device):
    matrix = torch.randint(0, 256, (40, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    assert hashed(matrix[:, 128:256]) == hashed(matrix[:, 128:256].clone()) != hashed(matrix[:, :128])


def test_what_is_read_twice_is_the_same(on_device):
    found = Hash()
    found.update(torch.ones(3, 128, dtype=torch.uint8))
    assert found.hexdigest() == found.hexdigest() == hashed(torch.ones(3, 128, dtype=torch.uint8))
    assert hashed(torch.empty(0, 128, dtype=torch.uint8)) != hashed()
