"""What the readers of trainer and engine share: the precision of a live tensor, read from its dtype and the shape and dtype of its scales,
and the operators of a layer. The format of FP32 scales is what the module promises; the trainer's values must keep the promise. A
parameter that no known operator uses is refused: an incomplete graph proves nothing."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_rl.errors import RunError
from megatron_rl.precision.graph.decoder import LAYER, LayerPrecision, Operator, decoder_graph
from megatron_rl.precision.graph.graph import PrecisionGraph, TensorPrecision
from megatron_rl.precision.graph.kernels import Kernel, digest, read_machine
from parallel.formats import FORMATS

FP32 = TensorPrecision("fp32")
TABLE_ROWS = 128  # positions of a rotary table that are compared


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype (fp32, bf16, e4m3), or torch's own name if there is none."""
    name = str(dtype).removeprefix("torch.")
    short = re.match(r"float8_(e\dm\d)", name)
    return short[1] if short else name.replace("bfloat", "bf").replace("float", "fp")


def unquantized_format(tensor: torch.Tensor) -> TensorPrecision:
    """Return the format of a tensor without scales."""
    return TensorPrecision(dtype_name(tensor.dtype))


def block_format(data: torch.Tensor, scale: torch.Tensor, scales: str) -> TensorPrecision:
    """Return the format of `data` `[..., N, K]` with one scale per block. Stacked experts count as one matrix each.

    Edge blocks may be partial, so the block is that of the format in `FORMATS` with these dtypes and shapes, or else what the shapes imply
    ("tensor" for a single scale). `scales` is the format of FP32 scales; that of bytes is read from `FORMATS`.
    """
    dtype, scales = dtype_name(data.dtype), _scales_of(scale, scales)
    if data.dim() < 2 or scale.dim() < 2:
        return TensorPrecision(dtype, "tensor", scales)
    rows, cols, grid = *data.shape[-2:], tuple(scale.shape[-2:])
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in (data, scale))
    candidates = (format for format in FORMATS.values() if format.block and (format.dtype, format.scale_dtype) == dtypes)
    known = next((format for format in candidates if format.scale_grid(rows, cols) == grid), None)
    height, width = known.block if known and known.block else (-(-rows // grid[0]), -(-cols // grid[1]))
    return TensorPrecision(dtype, f"{height}x{width or cols}", known.scale_format if known and scale.dtype == torch.uint8 else scales)


def channel_format(data: torch.Tensor, scale: torch.Tensor) -> TensorPrecision:
    """Return the format of an INT8 weight, `[N, K]` or in a kernel's order `[K, N]`, with one scale per output channel `[N, 1]`; stacked
    experts are `[E, N, K]` and `[E, N, 1]`. Raise ValueError for other shapes."""
    stacked = data.shape[:-2] == scale.shape[:-2]
    if min(data.dim(), scale.dim()) < 2 or not stacked or scale.shape[-1] != 1 or scale.shape[-2] not in data.shape[-2:]:
        raise ValueError(f"INT8 weights {list(data.shape)} with scales {list(scale.shape)}: must have one scale per output channel")
    return TensorPrecision(dtype_name(data.dtype), "channel", _scales_of(scale, "fp32"))


def _scales_of(scale: torch.Tensor, promised: str) -> str:
    return promised if scale.dtype == torch.float32 else dtype_name(scale.dtype)


def check_scales(scale: torch.Tensor, promised: str) -> str:
    """Return the format "pow2" or "fp32" that FP32 scales were promised to have, or what their values are instead: "fp32" if they are not
    all powers of two, "invalid" if they are not all positive numbers. An engine's values are made up before its first sync."""
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        return "invalid"
    return "fp32" if promised == "pow2" and bool((scale.view(torch.int32) & 0x7FFFFF).any()) else promised  # bits of the mantissa


def digest_table(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the name of a table of cosines and sines `[positions, pairs]`, by the values of its first positions in `dtype`."""
    rows = torch.stack([table[:TABLE_ROWS].to("cpu", dtype).float() for table in (cos, sin)])
    return f"table {digest(rows.numpy().tobytes())}"


class Reader:
    """Reads a model's operators and remembers the tensors that they use."""

    side: str  # column of the table of operators that names this side's modules
    skipped: tuple[str, ...] = ()  # prefixes of parameters that the other side does not have
    model: Any
    read_linear: Callable[..., Operator]  # reads a linear layer, quantized or not
    identify: Callable[[str, Any], Kernel]  # returns what computes an operator of a kind ("norm", "linear") that is this module
    read_residual: Callable[[Any], TensorPrecision]  # returns the format of the residual stream that a norm reads
    hidden: TensorPrecision  # activations between operators

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def connect(self, layers: Mapping[int, LayerPrecision], ends: Mapping[str, Operator]) -> PrecisionGraph:
        """Return the graph of what was read. Raise RunError if no operator uses a parameter."""
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in self.seen and not name.startswith(self.skipped):
                raise RunError(f"the precision graph has no operator that uses the {self.side} parameter {name}")
        return replace(decoder_graph(self.hidden, layers, ends), machine=read_machine(torch))

    def read_modules(self, layer: Any) -> dict[str, Operator]:
        """Read those operators of a layer that are modules."""
        operators = {}
        for name, (_, columns) in LAYER.items():
            modules = (_find_module(layer, path) for path in columns.get(self.side, ()))
            if (module := next((module for module in modules if module is not None), None)) is not None:
                x = self.read_residual(module) if name in ("input_norm", "post_attention_norm") else None
                operator = self.read_weighted(module, x) if name.endswith("norm") else self.read_linear(module)
                operators[name] = operator if operator.kernel else replace(operator, kernel=self.identify(name, module))
        return operators

    def read_weighted(self, module: Any, x: TensorPrecision | None = None, weight: Any = None) -> Operator:
        """Read a module that multiplies its weight, or `weight`, in high precision. `x`: format of the input, if not the hidden states'."""
        weight_format = self.read_tensor(module.weight if weight is None else weight)
        operator = Operator({"x": x or self.hidden}, type(module).__name__)
        return operator.with_inputs(weight=weight_format, bias=self.read_tensor(getattr(module, "bias", None)))

    def read_tensor(self, tensor: Any) -> TensorPrecision | None:
        """Return the format of a tensor without scales, or None if the module has none."""
        if not isinstance(tensor, torch.Tensor):
            return None
        self.seen.add(id(tensor))
        return unquantized_format(tensor)


def _find_module(module: Any, path: str) -> Any:
    """Return the module at a path, or None if there is none or Megatron's placeholder of a norm."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return None if type(module).__name__ == "IdentityOp" else module
