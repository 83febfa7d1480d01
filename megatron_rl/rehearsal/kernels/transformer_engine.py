"""Transformer Engine 2.20 as shape functions: block-scaled quantizers and matrix products, fused Adam, and multi-tensor kernels.

Megatron imports many more names. They can be imported, but not called.

    scales, data       `pytorch/tensor/float8_blockwise_tensor.py`, Float8BlockQuantizer.get_scale_shape, get_columnwise_shape
    products           `common/gemm/cublaslt_gemm.cu`, CanonicalizeGemmInput and cublas_gemm; the 32 MiB workspace is part of the context
    Adam               `pytorch/optimizers/fused_adam.py`
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron_rl.rehearsal.kernels import RefusedKernelError, count, require
from megatron_rl.rehearsal.kernels.match import Call

VERSION = "2.20.2"
_GEMM, _QUANTIZER = "Transformer Engine general_gemm", "Transformer Engine Float8BlockQuantizer"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Storage:
    """Float8BlockwiseQTensorStorage."""

    def __init__(
        self,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp8_dtype: Any,
        quantizer: Any,
        is_2D_scaled: bool,
    ) -> None:
        self._metadata = {name: value for name, value in locals().items() if name != "self"}

    def get_metadata(self) -> dict[str, Any]:
        return self._metadata

    def view(self, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return data [mn, k] and scales of the row-wise or column-wise side."""
        data, scale = self._metadata[f"{side}_data"], self._metadata[f"{side}_scale_inv"]
        require(data is not None and scale is not None, _GEMM, f"an operand has no {side} data")
        return data, scale


class _Quantizer:
    """Float8BlockQuantizer."""

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        self.dtype, self.block_scaling_dim = fp8_dtype, block_scaling_dim
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise, self.columnwise = rowwise, columnwise

    def __call__(self, x: torch.Tensor) -> _Storage:
        require(x.device.type == "cuda" and x.is_contiguous(), _QUANTIZER, f"{list(x.shape)} on the {x.device.type}, strides {x.stride()}")
        require(x.dtype in _DTYPES, _QUANTIZER, f"the input is {x.dtype}")
        rows, cols = x.numel() // x.shape[-1], x.shape[-1]
        require(cols % 16 == 0 and (not self.columnwise or rows % 16 == 0), _QUANTIZER, f"[{rows}, {cols}] are not multiples of 16")
        new, square = partial(torch.empty, device=x.device), self.block_scaling_dim == 2
        sides: dict[str, Any] = dict.fromkeys(("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"))
        if self.rowwise:
            sides["rowwise_data"] = new(x.shape, dtype=torch.uint8)
            sides["rowwise_scale_inv"] = new(_scale_shape(rows, cols, square), dtype=torch.float32)
        if self.columnwise:
            sides["columnwise_data"] = new((cols, *x.shape[:-1]), dtype=torch.uint8)
            sides["columnwise_scale_inv"] = new(_scale_shape(cols, rows, square), dtype=torch.float32)
        count("other", 0, x, *(side for side in sides.values() if side is not None))
        return _Storage(**sides, fp8_dtype=self.dtype, quantizer=self, is_2D_scaled=square)


def _scale_shape(mn: int, k: int, square: bool) -> tuple[int, int]:
    """Return the shape of the scales of data [mn, k], whose last dimension is padded to a multiple of 4."""
    last = -(-k // 128) if square else mn
    return -(-(mn if square else k) // 128), -(-last // 4) * 4


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    grad: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None, None, None]:
    """B [tokens, in] @ A [out, in]^T for layout `TN`; `NN` and `NT` use the column-wise data of one or both operands. Routers multiply
    plain tensors."""
    require(layout in ("TN", "NN", "NT"), _GEMM, f"layout {layout}")
    if isinstance(A, torch.Tensor):
        return _multiply_plain(B.t() if layout[1] == "T" else B, A.t() if layout[0] == "T" else A, out_dtype or A.dtype), None, None, None
    require(use_split_accumulator, _GEMM, "block-scaled products need the split accumulator")
    require(not (A.get_metadata()["is_2D_scaled"] and B.get_metadata()["is_2D_scaled"]), _GEMM, "both operands have square blocks")
    a, a_scale = A.view("rowwise" if layout[0] == "T" else "columnwise")
    b, b_scale = B.view("columnwise" if layout[1] == "T" else "rowwise")
    for data, scale, storage in ((a, a_scale, A), (b, b_scale, B)):
        _check_operand(data, scale, storage.get_metadata()["is_2D_scaled"])
    (n, k), (m, k_of_b) = a.shape, b.shape
    require(k == k_of_b, _GEMM, f"contractions of {k} and {k_of_b}")
    dtype = out_dtype or torch.bfloat16
    require(dtype in _DTYPES, _GEMM, f"the result is {dtype}")
    if out is None:
        require(not accumulate, _GEMM, "nothing to add to")
        out = torch.empty(m, n, dtype=dtype, device=a.device)
    Call(_GEMM).check("out", out, f"{m} {n}", (dtype,))
    require(n * out.itemsize % 16 == 0 and out.data_ptr() % 16 == 0, _GEMM, f"rows of {n} {dtype} are not multiples of 16 bytes")
    count("fp8 WGrad" if layout == "NT" else "fp8", 2 * m * n * k, a, b, a_scale, b_scale, out)
    return out, None, None, None


def _multiply_plain(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    (m, k), (k_of_right, n) = left.shape, right.shape
    fits = k == k_of_right and left.dtype == right.dtype and left.device.type == right.device.type == "cuda"
    require(fits, _GEMM, f"[{m}, {k}] {left.dtype} times [{k_of_right}, {n}] {right.dtype}")
    out = torch.empty(m, n, dtype=dtype, device=left.device)
    count("bf16" if left.itemsize == 2 else "fp32", 2 * m * n * k, left, right, out)
    return out


def _check_operand(data: torch.Tensor, scale: torch.Tensor, square: bool) -> None:
    call, (mn, k) = Call(_GEMM), data.shape
    rows, columns = _scale_shape(mn, k, square)
    call.check_all(locals(), f"data [* *] uint8; scale [{rows} {columns}] float32")
    call.require(k % 16 == 0 and data.data_ptr() % 16 == 0, f"an operand [{mn}, {k}] has rows that are not multiples of 16 bytes")


class FusedAdam(torch.optim.Optimizer):
    """One kernel for all parameters of a dtype. The first step allocates FP32 moments."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = int(adam_w_mode)
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.empty_like(param, dtype=torch.float32).zero_()

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            tensors: list[list[torch.Tensor]] = [[], [], [], []]
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param)
                for slot, tensor in zip(tensors, (param.grad, param, *self.state[param].values()), strict=True):
                    slot.append(tensor)
            multi_tensor_applier(_multi_tensor_kernel("multi_tensor_adam"), self._dummy_overflow_buf, tensors)


def multi_tensor_applier(kernel: Any, overflow: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any) -> Any:
    kept = [at for at, tensor in enumerate(tensor_lists[0]) if tensor.numel()]
    lists = [[tensors[at] for at in kept] for tensors in tensor_lists]
    return kernel(65536, overflow, lists, *args) if kept else None


def _multi_tensor_kernel(name: str) -> Any:
    def kernel(chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], *args: Any) -> Any:
        for position in zip(*lists, strict=True):
            for tensor in position:
                fits = tensor.device.type == "cuda" and tensor.is_contiguous()
                require(fits, name, f"{list(tensor.shape)} is on the {tensor.device.type}")
                require(tensor.numel() == position[0].numel(), name, f"lists of {tensor.numel()} and {position[0].numel()} numbers")
        changed = lists[1:] if name == "multi_tensor_adam" else []  # weights and moments are read and written
        count("other", 0, *(tensor for tensors in (*lists, *changed) for tensor in tensors))
        if name == "multi_tensor_l2norm":
            return torch.ones(1, device="cuda"), torch.ones(len(lists[0]) if args and args[0] else 1, device="cuda")
        return None

    kernel.__name__ = name
    return kernel


def _no_offload(enabled: bool, *_: Any, **__: Any) -> Any:
    require(not enabled, "Transformer Engine's offloading of activations", "is not rehearsed")
    return contextlib.nullcontext(), lambda tensor: tensor


_PYTORCH = "transformer_engine.pytorch"
_MEMBERS: dict[str, dict[str, Any]] = {
    "transformer_engine_torch": {"DType": SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2", kFloat4E2M1="e2m1")},
    "transformer_engine": {"__version__": VERSION},
    f"{_PYTORCH}.tensor.float8_blockwise_tensor": {"Float8BlockQuantizer": _Quantizer},
    f"{_PYTORCH}.tensor.storage.float8_blockwise_tensor_storage": {"Float8BlockwiseQTensorStorage": _Storage},
    f"{_PYTORCH}.cpp_extensions": {"general_gemm": general_gemm},
    f"{_PYTORCH}.cpu_offload": {"get_cpu_offload_context": _no_offload},
    f"{_PYTORCH}.optimizers": {
        "FusedAdam": FusedAdam,
        "multi_tensor_applier": multi_tensor_applier,
        "multi_tensor_l2norm": _multi_tensor_kernel("multi_tensor_l2norm"),
        "multi_tensor_scale": _multi_tensor_kernel("multi_tensor_scale"),
        "multi_tensor_scale_tensor": _multi_tensor_kernel("multi_tensor_scale_tensor"),
    },
}
STANDS_FOR: dict[str, Callable[..., Any]] = {
    f"{_PYTORCH}.tensor.float8_blockwise_tensor.Float8BlockQuantizer.__init__": _Quantizer.__init__,
    f"{_PYTORCH}.tensor.storage.float8_blockwise_tensor_storage.Float8BlockwiseQTensorStorage.__new__": _Storage.__init__,
    f"{_PYTORCH}.cpp_extensions.gemm.general_gemm": general_gemm,
    f"{_PYTORCH}.optimizers.fused_adam.FusedAdam.__init__": FusedAdam.__init__,
}
_ABSENT = {(f"{_PYTORCH}.attention", "_SplitAlongDim"), (f"{_PYTORCH}.module.base", "get_workspace")}
"""Names that Megatron looks up and 2.20 no longer has."""


class _Module(ModuleType):
    """A module of the package. Unknown names can be looked up, but calling them is refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (self.__name__, name) in _ABSENT:
            raise AttributeError(name)
        if not name[0].isupper():
            return _Module(f"{self.__name__}.{name}")  # a module or a function
        made = type(name, (torch.nn.Module,), {"__init__": partial(_refuse, f"{self.__name__}.{name}")})
        setattr(self, name, made)
        return made

    def __call__(self, *_: Any, **__: Any) -> Any:
        _refuse(self.__name__)


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise RefusedKernelError(f"the rehearsal knows no {name}: add it to megatron_rl/rehearsal/kernels/transformer_engine.py")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parent, _, last = name.rpartition(".")
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch") and (parent, last) not in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_MEMBERS.get(module.__name__, {}))
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            vars(sys.modules[parent])[name] = module


def install() -> None:
    sys.meta_path.insert(0, _Finder())
