"""SGLang's all-reduce on a GPU in the order of ranks (`precision.reduction = "ranks"`).

All algorithms of its `CustomAllReduceV2` but multicast add the rounded numbers of ranks 0, 1, ... in FP32 and round once, as
docs/decisions.md cites. In multicast, the switch adds. Above a limit, and without NVLink between all ranks, SGLang takes NCCL, whose order
depends on sizes and channels. No GPU has run this with several ranks.
"""

from collections.abc import Callable
from typing import Any

import torch

_ORDERED = "CustomAllReduceV2"


def leave_out_multicast(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `CustomAllReduceV2.__init__`: no size is summed by multicast."""
    original(self, *args, **named)
    if not self.disabled:
        self.config = self.config._replace(num_mc_blocks=None)


def all_reduce(original: Callable[..., torch.Tensor], self: Any, input_: torch.Tensor) -> torch.Tensor:
    """Wrap `GroupCoordinator.all_reduce`: floats are summed by `CustomAllReduceV2`, in pieces of rows that it takes. Raise
    NotImplementedError if it is missing."""
    if self.world_size == 1 or not input_.is_floating_point() or not input_.is_cuda:
        return original(self, input_)
    ordered = self.ca_comm
    if type(ordered).__name__ != _ORDERED or ordered.disabled:
        raise NotImplementedError(f"precision.reduction = 'ranks' needs SGLang's {_ORDERED}, so NVLink between all ranks of an engine")
    if ordered.should_custom_ar(input_):
        return ordered.custom_all_reduce(input_)
    if len(input_) < 2:
        raise NotImplementedError(f"SGLang's {_ORDERED} takes no sum of {list(input_.shape)} {input_.dtype}")
    return torch.cat([all_reduce(original, self, half.contiguous()) for half in input_.tensor_split(2)])
