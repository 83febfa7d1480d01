"""Objects with tensors for another process: torch's own pickling takes a millisecond for each tensor, and a file descriptor for some."""

import io
from multiprocessing.reduction import ForkingPickler

import torch


class _Pickler(ForkingPickler):
    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return NotImplemented
        flat = value.detach().reshape(-1).clone(memory_format=torch.contiguous_format)  # whose stride is 1, of no or one number, too
        return _restore, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _restore(data, dtype, shape):
    return torch.from_numpy(data).view(dtype).view(shape)


def dumps(value):
    """Return the pickle of an object, whose CPU tensors are plain, contiguous ones of the same dtype, shape and bytes when it is loaded."""
    _Pickler(buffer := io.BytesIO()).dump(value)
    return buffer.getvalue()
