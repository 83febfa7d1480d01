"""The kernels that SGLang calls on a Hopper GPU, as functions of shapes: what their sources refuse is refused, and what they read, write
and multiply is counted. One way of calling them a file:

    jit           CUDA of SGLang's own that is compiled at first use (`sglang/kernels/jit/csrc`)
    triton        Triton of SGLang's and of this project's
    sgl_kernel    compiled beforehand (sgl-kernel, with its FlashAttention 3)

DeepGEMM's are the trainer's (`megatron_rl.rehearsal.kernels.deep_gemm`). A kernel that is not there is refused by name when it is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.recorder import shorten
from rollout_sglang.platform import stub_modules


def install() -> None:
    """Put them where SGLang looks for them. After the stubs of packages, before any module of SGLang's that has a kernel."""
    from megatron_rl.rehearsal.device import add_library
    from megatron_rl.rehearsal.fake_cuda import recorder
    from megatron_rl.rehearsal.kernels import deep_gemm as deep_gemm_kernels
    from rollout_sglang.rehearsal.kernels import deep_gemm, flashinfer, jit, sgl_kernel, triton

    deep_gemm_kernels.install(recorder)
    deep_gemm.install()
    triton.install()
    sgl_kernel.install()
    flashinfer.install()
    jit.install()
    functions: dict[str, Callable[..., Any]] = {}
    add_library("sglang", functions.__getitem__)
    add_library("megatron_rl", find_own_operator)
    _note_operators(functions)


def _note_operators(functions: dict[str, Callable[..., Any]]) -> None:
    """Let SGLang's custom operators be found by name: they are Python, and what they call is a kernel."""
    from sglang.srt.utils import common

    plain = common.direct_register_custom_op

    def register(op_name: str, op_func: Callable[..., Any], *args: Any, **named: Any) -> None:
        functions[op_name] = op_func
        plain(op_name, op_func, *args, **named)

    common.direct_register_custom_op = register


def find_own_operator(name: str) -> Callable[..., Any]:
    """Return the Python of one of this project's custom operators."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[f"megatron_rl::{name}"]._init_fn


def refuse_unknown() -> None:
    """From now on a name of a package that is not installed cannot be called, but as a decorator while a module is imported."""
    plain = stub_modules._StubModule.__call__

    def call(self: Any, *args: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        if not caller.f_code.co_flags & inspect.CO_OPTIMIZED:  # a module's or a class's own lines
            return plain(self, *args, **named)
        line = f"{shorten(caller.f_code.co_filename)}:{caller.f_lineno}"
        raise RefusedKernelError(f"{self.__name__} is not known to the rehearsal, asked for by {line}")

    stub_modules._StubModule.__call__ = call  # type: ignore[method-assign]
