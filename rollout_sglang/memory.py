"""Inside a scheduler process on a CPU: memory of weights and KV cache, given back while the trainer has its turn.

SGLang's own /release_memory_occupation needs torch_memory_saver, and that needs CUDA; without it, it frees nothing. Here the storages are
resized: tensors stay the objects that everybody holds, and their memory goes back to the system.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's own names."""
_CACHE_LISTS = ("k_buffer", "v_buffer", "kv_buffer")  # of MHA, of MLA

_away: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
"""What was given back, with its size in bytes."""


def release(weights: Mapping[str, torch.Tensor], pool: Any) -> None:
    """Gives back all of both; what they held is lost. `pool` is SGLang's KV cache. Raises ValueError for one that is not known."""
    caches = [tensor for name in _CACHE_LISTS for tensor in getattr(pool, name, None) or ()]
    if not caches:
        raise ValueError(f"the KV cache {type(pool).__name__} has none of {', '.join(_CACHE_LISTS)}")
    for tag, tensors in ((CACHE, caches), (WEIGHTS, weights.values())):
        if tag not in _away:
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
            _away[tag] = [(storage, storage.nbytes()) for storage in storages.values()]
            for storage, _ in _away[tag]:
                storage.resize_(0)


def restore(tag: str) -> None:
    """Takes it again, zeroed: attention multiplies what a mask hides by 0, and NaN would stay NaN. Nothing where none was given back."""
    for storage, size in _away.pop(tag, ()):
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
