"""FP32 state in a checkpoint: masters and Adam's moments, sharded like their weights, so that any layout can load them.

Megatron's `optimizer.sharded_state_dict` does not fit: it handles only 16-bit parameters, and with experts its names depend on the number
of optimizers on a rank. Here a tensor is named after its weight. The master of a quantized layer has the weight's own name.

Each data-parallel replica holds a slice of a weight's state. The replica with the largest slice gathers the whole tensor and writes or
reads it, so no rank holds more than its share, and little is sent.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron_rl.mcore.base.master_slices import MasterSlice, flatten_chained, iter_stepped
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear
from megatron_rl.mcore.optim.optimizer import MOMENTS

_PIECE = 1 << 20  # elements sent at a time (4 MiB), so that the device needs almost no memory for the exchange
Chunks = list[dict[str, Any]]  # the `sharded_state_dict()` of each model chunk; its tensors are the live parameters


class _SlicedState:
    """Tensors that this rank holds slices of, by "KIND.CHUNK.NAME"."""

    def __init__(self) -> None:
        self._entries: dict[str, _SlicedTensor] = {}

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's slices."""
        return {name: entry.slice.values for name, entry in self._entries.items()}

    def sharded_for_save(self) -> dict[str, Any]:
        """Return float32 tensors, sharded like their weights, for `dist_checkpointing.save`. Collective."""
        gathered = {name: entry.gather() for name, entry in self._entries.items()}
        return {name: self._entries[name].as_sharded(tensor) for name, tensor in gathered.items() if tensor is not None}

    def sharded_for_load(self) -> dict[str, Any]:
        """Return the same for `dist_checkpointing.load`, which fills or replaces the tensors."""
        owned = {name: entry for name, entry in self._entries.items() if entry.is_owner}
        return {name: fill_in_place(entry.as_sharded(entry.allocate())) for name, entry in owned.items()}

    @torch.no_grad()
    def load(self, loaded: dict[str, torch.Tensor]) -> None:
        """Copy in the result of `dist_checkpointing.load` for `sharded_for_load`. Collective."""
        for name, entry in self._entries.items():
            entry.scatter(loaded.get(name))


class MasterState(_SlicedState):
    """Masters of quantized layers. They replace the weights' bytes in `chunks`, since the bytes can be recomputed."""

    def __init__(self, layers: Iterable[QuantizedLinear], chunks: Chunks) -> None:
        super().__init__()
        masters = {id(layer.weight): layer.master for layer in layers}
        for number, weights in enumerate(chunks):
            for name, weight in [*_iter_weights(weights)]:
                if (master := masters.get(id(weight.data))) is not None:
                    self._entries[f"weight.{number}.{name}"] = _SlicedTensor("", weight, master)
                    del weights[name]


class OptimizerState(_SlicedState):
    """This rank's part of the optimizer state: moments, and masters of 16-bit weights. Missing moments are created as zeros."""

    def __init__(self, optimizer: Any, chunks: Chunks) -> None:
        super().__init__()
        self._optimizers = flatten_chained(optimizer)
        states = {id(parameter): tensors for part in self._optimizers for parameter, tensors in _iter_state(part)}
        for number, weights in enumerate(chunks):
            for name, weight in _iter_weights(weights):
                for kind, slice_ in states.get(id(weight.data), {}).items():
                    self._entries[f"{kind}.{number}.{name}"] = _SlicedTensor(f"optimizer.{kind}", weight, slice_)

    @property
    def step(self) -> int:
        """Number of Adam steps taken."""
        return max((group.get("step", 0) for part in self._optimizers for group in part.optimizer.param_groups), default=0)

    def set_step(self, step: int) -> None:
        """Set the number of Adam steps taken."""
        for part in self._optimizers:
            for group in part.optimizer.param_groups:
                group["step"] = step


@dataclass
class _SlicedTensor:
    """One state tensor, sharded like its weight. `key` is the prefix of its name."""

    key: str
    weight: Any
    slice: MasterSlice

    def __post_init__(self) -> None:
        self._counts = [end - start for start, end in pairwise(self.slice.edges)]  # elements on each replica; slices are consecutive
        self._owner = self._counts.index(max(self._counts))  # the replica with the largest slice
        self.is_owner = self.slice.group.rank() == self._owner  # whether this rank reads and writes the whole tensor
        self._device = self.weight.data.device  # used for communication

    def _iter_others(self, whole: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (replica, its flat part of `whole`) for every other replica with a nonempty part."""
        for replica, part in enumerate(whole.view(-1).split(self._counts)):
            if replica != self.slice.group.rank() and part.numel():
                yield replica, part

    @torch.no_grad()
    def gather(self) -> torch.Tensor | None:
        """Return the whole tensor on its owner and None elsewhere; in host memory unless it is unsharded. Collective. Slices may be
        offloaded to host memory (`mcore.optim.optimizer`), so pieces pass through the device one at a time."""
        values, group = self.slice.values, self.slice.group
        if group.size() == 1:
            return self.allocate()
        if not self.is_owner:
            if values.numel():
                self._send(values, self._owner)
            return None
        whole = torch.empty(self.weight.data.shape)
        whole.view(-1)[self.slice.start : self.slice.start + values.numel()] = values
        for replica, part in self._iter_others(whole):
            self._receive(part, replica)
        return whole

    def _send(self, part: torch.Tensor, replica: int) -> None:
        for piece in part.split(_PIECE):
            dist.send(piece.to(self._device), group=self.slice.group, group_dst=replica)

    def _receive(self, into: torch.Tensor, replica: int) -> None:
        buffer = torch.empty(min(into.numel(), _PIECE), device=self._device)
        for piece in into.split(_PIECE):
            received = buffer[: piece.numel()]
            dist.recv(received, group=self.slice.group, group_src=replica)
            piece.copy_(received)

    def allocate(self) -> torch.Tensor:
        """Return the tensor that receives the whole value when loading. If the state is not sliced, this is the state itself."""
        shape = self.weight.data.shape
        return self.slice.values.detach().view(shape) if self.slice.group.size() == 1 else torch.empty(shape)

    @torch.no_grad()
    def scatter(self, whole: torch.Tensor | None) -> None:
        """Distribute the loaded tensor of the owner. Collective."""
        values = self.slice.values
        if whole is not None:
            self.slice.fill(whole)
            for replica, part in self._iter_others(whole):
                self._send(part, replica)
        elif values.numel():
            self._receive(values, self._owner)

    def as_sharded(self, tensor: torch.Tensor) -> Any:
        """Return `tensor`, described like its weight."""
        if self.key:
            sharded = make_sharded_optimizer_tensor(self.weight, tensor, self.key)
        else:
            dtype = {"dtype": tensor.dtype} if isinstance(self.weight, ShardedTensor) else {}
            sharded = replace(self.weight, data=tensor, **dtype)
        return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))  # the owner holds the only copy


def fill_in_place(sharded: Any) -> Any:
    """Return a sharded tensor that loads in place. The halves of SwiGLU weights are views that the load fills; Megatron would concatenate
    the halves of all layers again."""
    if not isinstance(sharded, ShardedTensorFactory):
        return sharded

    def merge(parts: Any) -> torch.Tensor:
        is_filled = isinstance(parts, list) and parts[0].data_ptr() == sharded.data.data_ptr()
        return sharded.data if is_filled else sharded.merge_fn(parts)

    return replace(sharded, merge_fn=merge)


def _iter_weights(chunk: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, weight) for name, weight in chunk.items() if isinstance(weight, ShardedTensor | ShardedTensorFactory))


def _iter_state(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, MasterSlice]]]:
    """Yield every parameter with its `exp_avg` and `exp_avg_sq`, and with the `master` of a 16-bit parameter."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for parameter, slice_ in iter_stepped(optimizer):
        moments = optimizer.optimizer.state.get(slice_.values, {})
        state = {kind: replace(slice_, values=moments.get(kind, slice_.values.new_empty(0))) for kind in MOMENTS}
        yield parameter, state | ({"master": slice_} if parameter.itemsize == 2 else {})
