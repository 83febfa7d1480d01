"""Objects with tensors for another process: torch's own pickling takes a millisecond for each tensor, and a file descriptor for some."""

import io
from multiprocessing.reduction import ForkingPickler

import torch


class _Pickler(ForkingPickler):
    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return NotImplemented
        plain = value.detach().contiguous()
        return _restore, (plain.reshape(-1).view(torch.uint8).numpy(), plain.dtype, tuple(plain.shape))


def _restore(data, dtype, shape):
    return torch.from_numpy(data).view(dtype).view(shape)


def dumps(value):
    """Return the pickle of an object, whose CPU tensors are plain, contiguous ones of the same dtype, shape and bytes when it is loaded."""
    _Pickler(buffer := io.BytesIO()).dump(value)
    return buffer.getvalue()
