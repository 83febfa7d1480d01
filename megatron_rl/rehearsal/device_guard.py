"""Lets any build of torch run autograd on tensors of device `cuda` without a GPU, by a small C++ library. Does not import torch."""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.errors import UserError

_SOURCE = Path(__file__).with_suffix(".cpp")


def load() -> None:
    """Compile and load the library, before torch is imported. Raise UserError without a C++ compiler."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported; a rehearsal needs a process of its own")
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        raise UserError("g++", None, "is needed to compile the rehearsal's device guard", "install g++")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "device_guard.so"
        options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        command = [compiler, *options, str(_SOURCE), "-o", str(library), "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            raise UserError("g++", compiler, f"fails: {done.stderr.strip().splitlines()[-1]}", "install a C++20 compiler")
        for build in ("cpu", "cuda"):  # torch's own CUDA guard must be registered before it is replaced
            if (built := torch / "lib" / f"libtorch_{build}.so").exists():
                ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
