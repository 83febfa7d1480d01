"""Makes a CPU build of torch able to run autograd on tensors of device `cuda`, by thirty lines of C++. Imports without torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.errors import UserError

_SOURCE = Path(__file__).with_suffix(".cpp")


def load() -> None:
    """Load it before torch is imported; do nothing where torch is built for CUDA, which has it. Raise UserError without a compiler."""
    if "+cpu" not in importlib.metadata.version("torch"):
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: a rehearsal needs a process of its own")
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        raise UserError("g++", None, "compiles what a CPU build of torch lacks for a rehearsal", "install g++, or torch's CUDA build")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "no_device.so"
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        command = [compiler, *options, str(_SOURCE), "-o", str(library), "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError("g++", compiler, f"fails: {done.stderr.strip().splitlines()[-1]}", "install a C++20 compiler")
        ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
