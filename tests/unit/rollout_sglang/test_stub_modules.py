"""Stubs of GPU packages: what SGLang calls on the host works, and a kernel that is launched is named."""

import subprocess
import sys

PROGRAM = """
from rollout_sglang.platform import stub_modules
stub_modules.replace("triton")
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": 1})], key=["n"])
@triton.jit
def add_kernel(x, n: tl.constexpr):
    return x

@triton.jit(do_not_specialize=["x"])
def other_kernel(x):
    return x

assert [triton.cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2] and [triton.next_power_of_2(n) for n in (1, 3, 4)] == [1, 4, 4]
assert add_kernel.__name__ == "add_kernel"
for kernel in (add_kernel, other_kernel):
    try:
        kernel[(1,)](3, 4)
    except RuntimeError as error:
        print(error)
"""


def test_a_launched_kernel_is_named():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = [f"the kernel __main__.{name} cannot run: its package is not installed" for name in ("add_kernel", "other_kernel")]
    assert done.stdout.splitlines() == lines
