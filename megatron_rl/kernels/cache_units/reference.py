"""What attends to an E4M3 cache with scales by layer (`precision.kv_cache`), on a GPU by one kernel."""

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.precision.kv_cache import to_units


@with_kernel
def enter_units(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries `[t, ...]` times the scale of keys, and keys and values `[t, ...]` in units of their `scales`, float32 `[2]`."""
    key_scale, value_scale = scales.unbind()
    return query * key_scale, to_units(key, key_scale), to_units(value, value_scale)
