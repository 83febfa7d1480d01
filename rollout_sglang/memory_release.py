"""Inside a scheduler process on a CPU: the KV cache's memory, given back while the trainer has its turn.

SGLang's own /release_memory_occupation needs torch_memory_saver, and that needs CUDA; without it, it frees nothing. Here the storages are
resized: tensors stay the objects that everybody holds, and their memory goes back to the system. Weights stay: SGLang's lie in memory
that torch cannot resize.
"""

from __future__ import annotations

from typing import Any

import torch

CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's own names."""
_BUFFER_NAMES = ("k_buffer", "v_buffer", "kv_buffer")  # of MHA, of MLA

_released: dict[torch.UntypedStorage, int] = {}
"""What was given back, with its size in bytes."""


def release(pool: Any) -> None:
    """Gives back the memory of SGLang's KV cache; what it held is lost. Raises ValueError for a cache that is not known."""
    tensors = [tensor for name in _BUFFER_NAMES for tensor in getattr(pool, name, None) or ()]
    if not tensors:
        raise ValueError(f"the KV cache {type(pool).__name__} has none of {', '.join(_BUFFER_NAMES)}")
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.nbytes():  # keys and values may share one, and a second time there is none
            _released[storage] = storage.nbytes()
            storage.resize_(0)


def restore() -> None:
    """Takes it again, zeroed: attention multiplies what a mask hides by 0, and NaN would stay NaN. Nothing where none was given back."""
    while _released:
        storage, size = _released.popitem()
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
