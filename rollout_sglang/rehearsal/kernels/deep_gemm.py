"""DeepGEMM as SGLang imports it: the products of `megatron_rl.rehearsal.kernels.deep_gemm`, and stubs of the rest."""

from __future__ import annotations

import sys
from importlib import import_module

_SETTINGS = ("set_pdl", "set_num_sms", "set_compile_mode")


def install() -> None:
    known = sys.modules.pop("deep_gemm")
    deep_gemm = import_module("deep_gemm")  # its stub
    vars(deep_gemm).update({name: value for name, value in vars(known).items() if callable(value)})
    vars(deep_gemm).update(dict.fromkeys(_SETTINGS, lambda _: None))
    vars(deep_gemm).update(get_num_sms=lambda: 132, get_compile_mode=lambda: 0)
