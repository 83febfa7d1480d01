"""Helpers for tests of kernels: random numbers, tests that run in Triton's interpreter, and compilation for Hopper, which needs no GPU."""

import functools
import importlib.machinery
import os
import subprocess

import pytest
import torch

from support.processes import call_in_fresh_process

TRITON = importlib.machinery.PathFinder.find_spec("triton")  # not util.find_spec, which finds SGLang's stub modules
needs_triton = pytest.mark.skipif(TRITON is None, reason="Triton is not installed: GPU builds of torch bring it")


def random(*shape, seed, dtype=torch.float32):
    """Return normally distributed numbers: the same ones for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_interpreter(test):
    """Run a test in a process of its own with Triton's interpreter, which Triton chooses when it is first imported."""

    @needs_triton
    @functools.wraps(test)
    def run():
        call_in_fresh_process(_call_undecorated, test.__module__, test.__name__, TRITON_INTERPRET="1")

    return run


def _call_undecorated(module, name):
    getattr(importlib.import_module(module), name).__wrapped__()


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
