"""The Triton kernel that quantises activations gives the reference's bytes and scales. Runs in Triton's interpreter, on any device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: GPU builds of torch bring it")

CASES = """
import itertools, torch
from support.activations import check_kernel, uneven

for form, dtype, (tokens, width) in itertools.product(
    ("pow2", "fp32"), (torch.float32, torch.bfloat16), ((128, 128), (130, 256), (3, 128), (256, 384))
):
    check_kernel(uneven(tokens, width, dtype), form)
for form in ("pow2", "fp32"):
    check_kernel(torch.zeros(130, 128), form)
    check_kernel(uneven(640, 128, torch.bfloat16), form, groups=[128, 0, 384, 128])
    check_kernel(torch.empty(0, 128), form)
"""


@pytest.mark.slow
def test_bytes_and_scales_are_the_references():
    """In a process of its own: the interpreter is chosen when Triton is first imported."""
    root = Path(__file__).parents[2]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join([str(root), str(root / "tests"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", CASES], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_other_widths_and_groups_are_refused():
    import torch

    from megatron_rl.fp8.backends.activation_kernel import quantize_activation

    for shape, groups in (((128, 100), None), ((128, 128), [100, 28]), ((256, 128), [128])):
        with pytest.raises(ValueError, match="multiples of 128"):
            quantize_activation(torch.zeros(shape), "pow2", rows=True, columns=True, groups=groups)
