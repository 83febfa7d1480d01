"""What the readers of trainer and engine share. A parameter that no known operator uses is refused: an incomplete graph proves nothing."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from megatron_rl.precision.graph.decoder import LAYER, Operator
from megatron_rl.precision.graph.formats import unquantized_format
from megatron_rl.precision.graph.graph import TensorPrecision

FP32 = TensorPrecision("fp32")


class Reader(ABC):
    """Reads a model's operators and remembers the tensors that they use."""

    side: str  # column of the table of operators that names this side's modules
    hidden: TensorPrecision  # activations between operators

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def read_modules(self, layer: Any) -> dict[str, Operator]:
        """Read those operators of a layer that are modules."""
        operators = {}
        for name, (_, columns) in LAYER.items():
            modules = (_find_module(layer, path) for path in columns.get(self.side, ()))
            if (module := next((module for module in modules if module is not None), None)) is not None:
                x = self.read_residual(module) if name in ("input_norm", "post_attention_norm") else None
                operators[name] = self.read_weighted(module, x) if name.endswith("norm") else self.read_linear(module)
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

    @abstractmethod
    def read_linear(self, module: Any) -> Operator:
        """Read a linear layer, quantized or not."""

    @abstractmethod
    def read_residual(self, norm: Any) -> TensorPrecision:
        """Return the format of the residual stream that a norm reads."""

    def list_unread(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters that no operator uses."""
        return [name for name, parameter in model.named_parameters() if id(parameter) not in self.seen]


def _find_module(module: Any, path: str) -> Any:
    """Return the module at a path, or None if there is none or Megatron's placeholder of a norm."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return None if type(module).__name__ == "IdentityOp" else module
