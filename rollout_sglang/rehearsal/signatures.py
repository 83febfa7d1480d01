"""Print where functions of shapes, of trainer and engine, differ from the installed libraries (`megatron_rl.rehearsal.signatures`).

python -m rollout_sglang.rehearsal.signatures       # exit code 1 where one does
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_rl.rehearsal import hopper
from megatron_rl.rehearsal.signatures import compare


def list_kernels() -> dict[str, Callable[..., Any]]:
    """Return all functions of shapes by the name of what they stand for."""
    from megatron_rl.rehearsal.kernels import deep_gemm, transformer_engine
    from rollout_sglang.rehearsal.kernels import flashinfer, sgl_kernel

    return {
        name: function for module in (deep_gemm, transformer_engine, sgl_kernel, flashinfer) for name, function in module.STANDS_FOR.items()
    }


def main() -> int:
    hopper.pretend()
    answer, sys.stdout = sys.stdout, sys.stderr  # libraries print
    found = compare(list_kernels())
    print(*found, sep="\n", end="\n" if found else "", file=answer, flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
