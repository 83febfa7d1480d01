"""Checks of tensors as SGLang's kernels make them (`sgl_kernel/tensor.h`): dimensions, strides, dtype and device, by names that must mean
the same in all tensors of a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from megatron_rl.rehearsal.fake_cuda import recorder
from megatron_rl.rehearsal.kernels import require

HALF = (torch.bfloat16, torch.float16)
INDEX = (torch.int32, torch.int64)
_VECTOR = 16
"""Bytes that a kernel loads at once."""


class Call:
    """One call of a kernel. `sizes`: names of dimensions and strides -> what they are."""

    def __init__(self, kernel: str, **sizes: int) -> None:
        self.kernel, self.sizes = kernel, dict(sizes)

    def check(
        self,
        name: str,
        tensor: Any,
        shape: str,
        dtype: torch.dtype | Collection[torch.dtype],
        strides: str | None = None,
        align: int = _VECTOR,
    ) -> Any:
        """Refuse a tensor of another shape, dtype, layout or device. `shape` and `strides`: names, numbers or `*` for any, outermost first;
        without strides it must be contiguous. A stride of a dimension of size 1 is not looked at."""
        if not isinstance(tensor, torch.Tensor):
            self.require(False, f"{name} is {type(tensor).__name__}, not a tensor")
        found, allowed, words = list(tensor.shape), (dtype,) if isinstance(dtype, torch.dtype) else dtype, shape.split()
        self.require(tensor.device.type == "cuda", f"{name} is on the {tensor.device.type}")
        self.require(tensor.dtype in allowed, f"{name} {found} is {_name(tensor.dtype)}, not {', '.join(map(_name, allowed))}")
        self.require(len(found) == len(words), f"{name} is {found}, not [{', '.join(words)}]")
        fits = all(self._fits(word, size) for word, size in zip(words, found, strict=True))
        self.require(fits, f"{name} is {found}, not [{', '.join(words)}] with {self.sizes}")
        strided = f"{name} {found} has strides {list(tensor.stride())}, not ({strides or 'those of a contiguous one'})"
        if strides is None:
            self.require(tensor.is_contiguous(), strided)
        else:
            steps = zip(strides.split(), found, tensor.stride(), strict=True)
            self.require(all(size == 1 or self._fits(word, stride) for word, size, stride in steps), strided)
        if tensor.dtype.is_floating_point and found and found[-1] * tensor.itemsize % align == 0:
            self.require(tensor.data_ptr() % align == 0, f"{name} {found} does not begin at a multiple of {align} bytes")
        return tensor

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
        recorder().work("other", 0, *tensors, kernel=self.kernel)

    def multiplied(self, kind: str, flops: int, *tensors: torch.Tensor) -> None:
        """Count a product of `kind`, such as `fp8`, and what it reads and writes."""
        recorder().work(kind, flops, *tensors, kernel=self.kernel)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
