"""The Triton kernel that quantises activations gives the reference's bytes and scales. It runs in Triton's interpreter here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: GPU builds of torch bring it")

CASES = """
import itertools, torch
from support.fp8_reference import check_into, check_kernel, uneven

for form, dtype, (tokens, width) in itertools.product(
    ("pow2", "fp32"), (torch.float32, torch.bfloat16), ((128, 128), (130, 256), (3, 128), (256, 384))
):
    check_kernel(uneven(tokens, width, dtype), form)
    check_into(uneven(tokens, width, dtype), form)
for form in ("pow2", "fp32"):
    check_kernel(torch.zeros(130, 128), form)
    check_kernel(uneven(640, 128, torch.bfloat16), form, groups=[128, 0, 384, 128])
    check_kernel(torch.empty(0, 128), form)
"""


COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_rl.precision.backends.triton_quantize import LAUNCH, quantize_tile as kernel

pointers = {"x": "*bf16", "row_data": "*u8", "column_data": "*u8", "group_start": "*i64", "group_length": "*i64"}
pointers |= {"row_scale": "*fp32", "column_scale": "*fp32"}
sizes = dict.fromkeys(("tokens", "padded_tokens", "width", "row_scale_stride", "row_scale_step"), "i32")
for pow2, columns, grouped in ((True, True, False), (False, True, True), (True, False, False)):
    fixed = dict(POW2=pow2, ROWS=True, COLUMNS=columns, GROUPED=grouped, EPSILON=1e-10, LARGEST=448.0, TILE=128)
    signature = {name: ({**pointers, **sizes}).get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in pointers or n in ("width", "padded_tokens")}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in fixed.items()}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH).asm["ptx"]
    assert not re.search("fma|div[.](approx|full)", ptx), "not rounded as the reference"
    assert "st.global.v4" in ptx and "st.global.b8" not in ptx, "stores byte by byte"
"""


def run(code: str, **environment: str) -> None:
    """In a process of its own: the interpreter is chosen when Triton is first imported."""
    root = Path(__file__).resolve().parents[3]
    environment |= {"PYTHONPATH": ":".join([str(root), str(root / "tests"), *sys.path]), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_bytes_and_scales_are_the_references():
    run(CASES, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_it_compiles_for_hopper_with_the_references_rounding(tmp_path):
    """Needs no GPU: Triton brings its own assembler."""
    run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


def test_other_widths_and_groups_are_refused():
    import torch

    from megatron_rl.precision.backends.triton_quantize import quantize_activation

    for shape, groups in (((128, 100), None), ((128, 128), [100, 28]), ((256, 128), [128])):
        with pytest.raises(ValueError, match="multiples of 128"):
            quantize_activation(torch.zeros(shape), "pow2", rows=True, columns=True, groups=groups)
