"""Offloads memory that only optimizer steps need: Adam's moments, separate FP32 masters and gradients.

Moments and masters are copied to host buffers that are allocated once. Gradients are freed without a copy, since they are zeroed before
each step. FP32 weights that are their own masters stay; Megatron's `offload_to_cpu` would move them too, along with norms and embeddings
that the sync reads. Checkpoints can be written while the state is offloaded.
"""

from typing import Any

import torch

from megatron_rl.mcore.checkpoint.optimizer import MOMENTS
from megatron_rl.mcore.optim.master_slices import flatten_chained, iter_masters


class OptimizerOffloader:
    """Offloads and reloads one actor's optimizer. Both methods are idempotent."""

    def __init__(self, wrapped_chunks: list[Any], optimizer: Any, device: torch.device) -> None:
        """`wrapped_chunks` are the DistributedDataParallel wrappers, which own the gradients."""
        self.gradient_buffers = [buffer for chunk in wrapped_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._optimizers, self._device = flatten_chained(optimizer), device
        self._host: dict[tuple[int, str], torch.Tensor] = {}
        self._offloaded = False

    def offload(self) -> None:
        """Free the device memory. No optimizer step is possible until `reload`."""
        if self._offloaded:
            return
        self._move(self._host_copy)
        for buffer in self.gradient_buffers:
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies must finish before their sources are freed
            torch.cuda.empty_cache()
        self._offloaded = True

    def reload(self) -> None:
        """Undo `offload`. Gradients are zero."""
        if not self._offloaded:
            return
        self._move(lambda _, tensor: tensor.to(self._device, non_blocking=True, copy=True))
        for buffer in self.gradient_buffers:
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        self._offloaded = False

    def _move(self, copy: Any) -> None:
        """Replace every tensor by `copy(key, tensor)`."""
        for part in self._optimizers:
            for state in part.optimizer.state.values():
                for kind in MOMENTS:
                    if kind in state:
                        state[kind] = copy((id(state), kind), state[kind])
            for _, master in iter_masters(part):
                master.data = copy((id(master), "master"), master.data)

    def _host_copy(self, key: tuple[int, str], tensor: torch.Tensor) -> torch.Tensor:
        if key not in self._host:
            self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        return self._host[key].copy_(tensor, non_blocking=True)
