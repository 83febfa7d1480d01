"""Helpers for tests of kernels: random numbers, tests that run in Triton's interpreter, and compilation for Hopper, which needs no GPU."""

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_rl.workers.process import die_with_parent

_FOLDER = f"{sys.prefix}/triton"  # tools/test.sh installs Triton here, where torch and SGLang do not find it; GPU builds of torch bring it
TRITON = PathFinder.find_spec("triton", [*sys.path, _FOLDER])  # not util.find_spec, which finds SGLang's stub modules
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton, which tools/test.sh installs")


def random(*shape, seed, dtype=torch.float32):
    """Return normally distributed numbers: the same ones for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_interpreter(test):
    """Run a test by `call_with_triton`, in Triton's interpreter."""

    @needs_triton
    @functools.wraps(test)
    def run():
        call_with_triton(test, interpret=True)

    return run


def call_with_triton(function, interpret=False, alone=False):
    """Return the result of a module's function without arguments, called in a process that imports Triton, and not only its stub; `alone`
    in a process of its own, since Triton keeps what it compiled for another architecture."""
    start = _start_process.__wrapped__ if alone else _start_process
    return start(interpret).submit(_call_undecorated, function.__module__, function.__name__).result()


@functools.cache
def _start_process(interpret):
    """Return an executor with one process, which all tests share. Triton chooses its interpreter when it is first imported."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare, (os.getpid(), interpret))


def _prepare(parent, interpret):
    die_with_parent(parent)
    os.environ |= {"TRITON_INTERPRET": str(int(interpret)), "TRITON_CACHE_DIR": tempfile.mkdtemp()}
    sys.path.append(_FOLDER)


def _call_undecorated(module, name):
    function = getattr(importlib.import_module(module), name)
    return getattr(function, "__wrapped__", function)()


@contextmanager
def unmixed_rows():
    """Context manager in which the interpreter's products do not depend on a row's place in its tile, as on a GPU: they are summed up in
    float64. The BLAS of a CPU with AVX2 computes the last rows of a tile by another kernel."""
    from triton.runtime import interpreter

    def multiply(a, b, dtype):
        return np.matmul(a, b, dtype=np.float64).astype(dtype)

    with mock.patch.object(interpreter, "np", SimpleNamespace(**vars(np) | {"matmul": multiply})):
        yield


def ignore_marks(ptx):
    """Return PTX without the fused multiply-adds 0 x + x, which are x, or NaN for infinities."""
    return re.sub(r"fma\.rn\.f32 \t%\w+, (%\w+), 0f00000000, \1;", "", ptx)


def compile_for_hopper(kernel, launch, types, fixed, multiples):
    """Return (PTX, report of the assembler).

    Args:
        types: Types of arguments that are not int32.
        fixed: Values of all `constexpr` arguments.
        multiples: Integer arguments that are multiples of 16, as all pointers are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr" if name in fixed else "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if types.get(name, "").startswith("*") or name in multiples]
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch).asm["ptx"]
    assembler = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "-", "-o", os.devnull]
    return ptx, subprocess.run(assembler, input=ptx, capture_output=True, text=True, check=True).stderr
