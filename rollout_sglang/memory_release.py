"""Release the KV cache's memory of a scheduler process on a CPU while the trainer runs.

SGLang's own /release_memory_occupation needs torch_memory_saver, and so CUDA; without it, it frees nothing. Here the storages are
resized: the tensor objects stay, and their memory goes back to the system. Weights stay: torch cannot resize the memory they lie in.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CACHE, WEIGHTS = "kv_cache", "weights"
"""SGLang's names of its memory."""
_BUFFER_NAMES = ("k_buffer", "v_buffer", "kv_buffer")  # of MHA, of MLA

_released: dict[torch.UntypedStorage, int] = {}
"""Released storages and their sizes in bytes."""


def release(pool: Any) -> None:
    """Free the memory of SGLang's KV cache `pool` and lose its content. Raise ValueError for an unknown kind of cache."""
    tensors = [tensor for name in _BUFFER_NAMES for tensor in getattr(pool, name, None) or ()]
    if not tensors:
        raise ValueError(f"the KV cache {type(pool).__name__} has none of {', '.join(_BUFFER_NAMES)}")
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.nbytes():  # not yet released: keys and values may share one storage
            _released[storage] = storage.nbytes()
            storage.resize_(0)
    ctypes.CDLL(None).malloc_trim(0)  # the engine's glibc keeps freed pages otherwise (`launch_args`)


def restore() -> None:
    """Allocate what was released, zeroed: attention multiplies masked values by 0, and NaN would stay NaN."""
    while _released:
        storage, size = _released.popitem()
        storage.resize_(size)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
