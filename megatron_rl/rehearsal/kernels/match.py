"""Checks of the tensors of a kernel's call, and kernels that are described by such checks."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from megatron_rl.rehearsal.kernels import count, require

HALF = (torch.bfloat16, torch.float16)
INDEX = (torch.int32, torch.int64)
_DTYPES: dict[str, Collection[torch.dtype]] = {
    "half": HALF,
    "float": (*HALF, torch.float32),
    "index": INDEX,
    "any": (*HALF, torch.float32, torch.uint8, torch.float8_e4m3fn),
}
"""Sets of dtypes by name; other names are those of torch."""
_SPEC = re.compile(r"(\w+) \[([^]]*)] (\S+?)(?: \(([^)]*)\))?(?:; |$)")
_VECTOR = 16
"""Bytes that a kernel loads at once."""


class Call:
    """One call of a kernel. `sizes` maps names of dimensions and strides to their values, which must be equal in all tensors."""

    def __init__(self, kernel: str, **sizes: int) -> None:
        self.kernel, self.sizes = kernel, dict(sizes)

    def check_all(self, given: Mapping[str, Any], specs: str) -> None:
        """Check several arguments, in the form `name [shape] dtype (strides); ...`; see `check`.

        A dtype is a name of torch or of `_DTYPES`, alternatives as in `uint8|int8`, or `=other` for the dtype of another argument.
        """
        for name, shape, words, strides in _SPEC.findall(specs):
            dtypes: list[torch.dtype] = []
            for word in words.split("|"):
                if word.startswith("="):
                    dtypes.append(given[word[1:]].dtype)
                else:
                    dtypes += _DTYPES.get(word) or [getattr(torch, word)]
            self.check(name, given[name], shape, dtypes, strides or None)

    def check(self, name: str, tensor: Any, shape: str, dtypes: Collection[torch.dtype], strides: str | None = None) -> None:
        """Refuse a tensor of another shape, dtype, layout, alignment or device.

        Args:
            shape, strides: names, numbers or `*` for any value, outermost first. Without strides the tensor must be contiguous. Strides of
                dimensions of size 1 are ignored.
        """
        if not isinstance(tensor, torch.Tensor):
            self.require(False, f"{name} is {type(tensor).__name__}, not a tensor")
        found, words = list(tensor.shape), shape.split()
        self.require(tensor.device.type == "cuda", f"{name} is on the {tensor.device.type}")
        self.require(tensor.dtype in dtypes, f"{name} {found} is {_name(tensor.dtype)}, not {', '.join(map(_name, dtypes))}")
        fits = len(found) == len(words) and all(self._fits(word, size) for word, size in zip(words, found, strict=True))
        self.require(fits, f"{name} is {found}, not [{', '.join(words)}] with {self.sizes}")
        strided = f"{name} {found} has strides {list(tensor.stride())}, not ({strides or 'those of a contiguous tensor'})"
        if strides is None:
            self.require(tensor.is_contiguous(), strided)
        else:
            steps = zip(strides.split(), found, tensor.stride(), strict=True)
            self.require(all(size == 1 or self._fits(word, stride) for word, size, stride in steps), strided)
        if tensor.dtype.is_floating_point and found and found[-1] * tensor.itemsize % _VECTOR == 0:
            self.require(tensor.data_ptr() % _VECTOR == 0, f"{name} {found} does not begin at a multiple of {_VECTOR} bytes")

    def _fits(self, word: str, size: int) -> bool:
        if word == "*":
            return True
        if word.lstrip("-").isdigit():
            return int(word) == size
        return self.sizes.setdefault(word, size) == size

    def require(self, condition: bool, rule: str) -> None:
        require(condition, self.kernel, rule)

    def moved(self, *tensors: torch.Tensor) -> None:
        """Count tensors that the kernel reads or writes."""
        count("other", 0, *tensors, kernel=self.kernel)

    def multiplied(self, kind: str, flops: int, *tensors: torch.Tensor) -> None:
        """Count a matrix product of a kind such as `fp8`, and the tensors that it reads and writes."""
        count(kind, flops, *tensors, kernel=self.kernel)


class Kernel(NamedTuple):
    """A kernel that only moves memory, as checks of its arguments."""

    specs: str
    """See `Call.check_all`."""
    moved: str
    """Names of the arguments that the kernel reads or writes, twice if both; `x:N` for the first N rows of x."""
    parameters: str = ""
    """Names of positional arguments."""
    rule: Callable[[Call, Mapping[str, Any]], None] | None = None
    """Further checks."""

    def run(self, name: str, given: Mapping[str, Any]) -> None:
        """Check a call and count its memory traffic."""
        call = Call(name)
        call.check_all(given, self.specs)
        if self.rule is not None:
            self.rule(call, given)
        words = [word.partition(":") for word in self.moved.split()]
        call.moved(*(given[name][: call.sizes[rows]] if rows else given[name] for name, _, rows in words))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
