"""The number of elements of the largest tensor that operators allocate. Views and in-place writes do not count."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Context manager that sets `numel` to the size of the largest tensor that an operator of torch returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.is_view or function._schema.is_mutable:
            return result
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result
