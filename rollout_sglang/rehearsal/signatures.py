"""Prints where shape functions of trainer and engine differ from the installed libraries (`megatron_rl.rehearsal.signatures`).

python -m rollout_sglang.rehearsal.signatures       # exit code 1 if there is a difference
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_rl.rehearsal import hopper
from megatron_rl.rehearsal.signatures import compare


def list_kernels() -> dict[str, Callable[..., Any]]:
    """Return all shape functions by the name of the library function that they stand for."""
    from megatron_rl.rehearsal.kernels import deep_gemm, transformer_engine
    from rollout_sglang.rehearsal.kernels import sgl_kernel

    return deep_gemm.STANDS_FOR | transformer_engine.STANDS_FOR | sgl_kernel.STANDS_FOR


def main() -> int:
    hopper.pretend()
    answer, sys.stdout = sys.stdout, sys.stderr  # libraries print while they are imported
    found = compare(list_kernels())
    print(*found, sep="\n", end="\n" if found else "", file=answer, flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
