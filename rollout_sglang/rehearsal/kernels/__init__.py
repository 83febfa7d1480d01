"""Kernels that SGLang calls on a GPU, as shape functions: they make the checks of the kernels' sources and count their work.

    jit           SGLang's CUDA kernels that are compiled at first use (`sglang/kernels/jit/csrc`)
    triton        Triton kernels of SGLang and of this project
    sgl_kernel    precompiled kernels (sgl-kernel with its FlashAttention 3, FlashInfer's router)
    flashinfer    FlashInfer's attention

DeepGEMM's kernels are shared with the trainer (`megatron_rl.rehearsal.kernels.deep_gemm`). An unknown kernel is refused by name when it is
called.
"""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron_rl.rehearsal.kernels import RefusedKernelError
from megatron_rl.rehearsal.recorder import shorten
from rollout_sglang.platform import stub_modules


def install() -> None:
    """Install the kernels, after the stubs of packages and before any SGLang module that has a kernel."""
    from megatron_rl.rehearsal.device import add_library
    from megatron_rl.rehearsal.kernels import deep_gemm
    from rollout_sglang.rehearsal.kernels import flashinfer, jit, sgl_kernel, triton

    deep_gemm.install()
    known = sys.modules.pop("deep_gemm")
    stub = import_module("deep_gemm")
    vars(stub).update({name: value for name, value in vars(known).items() if callable(value)})
    vars(stub).update(dict.fromkeys(("set_pdl", "set_num_sms", "set_compile_mode"), lambda _: None))
    vars(stub).update(get_num_sms=lambda: 132, get_compile_mode=lambda: 0)
    for kernels in (triton, sgl_kernel, flashinfer, jit):
        kernels.install()
    functions: dict[str, Callable[..., Any]] = {}
    add_library("sglang", functions.__getitem__)
    add_library("megatron_rl", _find_own_operator)
    _record_operators(functions)


def _record_operators(functions: dict[str, Callable[..., Any]]) -> None:
    """Record the Python functions of SGLang's custom operators by name."""
    from sglang.srt.utils import common

    plain = common.direct_register_custom_op

    def register(op_name: str, op_func: Callable[..., Any], *args: Any, **named: Any) -> None:
        functions[op_name] = op_func
        plain(op_name, op_func, *args, **named)

    common.direct_register_custom_op = register


def _find_own_operator(name: str) -> Callable[..., Any]:
    """Return the Python function of one of this project's custom operators."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[f"megatron_rl::{name}"]._init_fn


def refuse_unknown() -> None:
    """From now on refuse calls of functions of stubbed packages, except of decorators while a module is imported."""
    plain = stub_modules._StubModule.__call__

    def call(self: Any, *args: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        if not caller.f_code.co_flags & inspect.CO_OPTIMIZED:  # code of a module or class body
            return plain(self, *args, **named)
        line = f"{shorten(caller.f_code.co_filename)}:{caller.f_lineno}"
        raise RefusedKernelError(f"{self.__name__} is not known to the rehearsal; it is called by {line}")

    stub_modules._StubModule.__call__ = call  # type: ignore[method-assign]
