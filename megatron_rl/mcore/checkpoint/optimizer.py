"""The FP32 part of a checkpoint: masters and both moments, split as the weights they belong to, so they load into any layout.

Megatron's own `optimizer.sharded_state_dict` cannot be used: it numbers 16-bit parameters only, while there are FP8 and FP32 ones among
them, and with experts its names depend on how many optimizers a rank has. Here a tensor is named after its weight; the master of a
quantized layer has the weight's own name, as its bytes are made from it.

Replicas hold a slice of each weight's state. For a checkpoint each weight's state is assembled on the replica that holds the most of it,
which writes or reads it: so no rank holds more than its share, and what is sent is little more than weights that two replicas share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear
from megatron_rl.mcore.optim.master_slices import MasterSlice, flatten_chained, iter_stepped

MOMENTS = ("exp_avg", "exp_avg_sq")
_PIECE = 1 << 20
"""Elements that pass through a device at a time: 4 MiB, which a plan need not count. Their copy to the host, about half a millisecond,
takes far longer than to start it or the exchange."""
Chunks = list[dict[str, Any]]
"""The `sharded_state_dict()` of the model's chunks, whose tensors are the live parameters."""


class _SlicedState:
    """Tensors of which this rank holds slices, by "KIND.CHUNK.NAME of the weight"."""

    def __init__(self) -> None:
        self._entries: dict[str, _SlicedTensor] = {}

    def _add(self, kind: str, chunk: int, name: str, key: str, weight: Any, slice_: MasterSlice) -> None:
        self._entries[f"{kind}.{chunk}.{name}"] = _SlicedTensor(key, weight, slice_)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's slices."""
        return {name: entry.slice.values for name, entry in self._entries.items()}

    def sharded_for_save(self) -> dict[str, Any]:
        """Return float32 tensors split as their weights, for `dist_checkpointing.save`. Collective."""
        gathered = {name: entry.gather() for name, entry in self._entries.items()}
        return {name: self._entries[name].as_sharded(tensor) for name, tensor in gathered.items() if tensor is not None}

    def sharded_for_load(self) -> dict[str, Any]:
        """Return the same for `dist_checkpointing.load`, which fills or replaces the tensors."""
        return {name: entry.as_loaded() for name, entry in self._entries.items() if entry.is_owner}

    @torch.no_grad()
    def load(self, loaded: dict[str, torch.Tensor]) -> None:
        """Copy in what `dist_checkpointing.load` returned for `sharded_for_load`. Collective."""
        for name, entry in self._entries.items():
            entry.scatter(loaded.get(name))


class MasterState(_SlicedState):
    """The masters of quantized layers, whose weights' bytes they replace in `chunks`: those are made from them."""

    def __init__(self, layers: Iterable[QuantizedLinear], chunks: Chunks) -> None:
        super().__init__()
        masters = {id(layer.weight): layer.master for layer in layers}
        for number, weights in enumerate(chunks):
            for name, weight in [*_iter_weights(weights)]:
                if (master := masters.get(id(weight.data))) is not None:
                    self._add("weight", number, name, "", weight, master)
                    del weights[name]


class OptimizerState(_SlicedState):
    """This rank's part of a Megatron optimizer's state: moments, and masters of 16-bit weights. Missing moments are created as zeros."""

    def __init__(self, optimizer: Any, chunks: Chunks) -> None:
        super().__init__()
        self._optimizers = flatten_chained(optimizer)
        states = {id(parameter): tensors for part in self._optimizers for parameter, tensors in _iter_state(part)}
        for number, weights in enumerate(chunks):
            for name, weight in _iter_weights(weights):
                for kind, slice_ in states.get(id(weight.data), {}).items():
                    self._add(kind, number, name, f"optimizer.{kind}", weight, slice_)

    @property
    def step(self) -> int:
        """Number of Adam's steps."""
        return max((group.get("step", 0) for part in self._optimizers for group in part.optimizer.param_groups), default=0)

    def set_step(self, step: int) -> None:
        """Set the number of Adam's steps."""
        for part in self._optimizers:
            for group in part.optimizer.param_groups:
                group["step"] = step


@dataclass
class _SlicedTensor:
    """One tensor of the state, described as its weight; `key` goes before the weight's key."""

    key: str
    weight: Any
    slice: MasterSlice

    @property
    def _counts(self) -> list[int]:
        """Elements on each replica, whose slices follow each other."""
        return [end - start for start, end in pairwise(self.slice.edges)]

    @property
    def _owner(self) -> int:
        """The replica with the largest slice."""
        return self._counts.index(max(self._counts))

    @property
    def is_owner(self) -> bool:
        """Whether this rank reads and writes the whole tensor."""
        return self.slice.group.rank() == self._owner

    def _iter_others(self, whole: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (replica, its part of the whole tensor, flat) of every other replica that has one."""
        for replica, part in enumerate(whole.view(-1).split(self._counts)):
            if replica != self.slice.group.rank() and part.numel():
                yield replica, part

    @torch.no_grad()
    def gather(self) -> torch.Tensor | None:
        """Return the whole tensor on its owner, in host memory or, where it is not cut, itself; None elsewhere. Collective.

        Slices may wait in host memory (`mcore.optim.offload`) while ranks speak through their devices: pieces pass there one at a time.
        """
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

    @property
    def _device(self) -> torch.device:
        """The device through which ranks speak: the weight's."""
        return self.weight.data.device

    def allocate(self) -> torch.Tensor:
        """Return the tensor to load the whole into: where it is not cut, itself."""
        shape = self.weight.data.shape
        return self.slice.values.detach().view(shape) if self.slice.group.size() == 1 else torch.empty(shape)

    @torch.no_grad()
    def scatter(self, whole: torch.Tensor | None) -> None:
        """Copy in the loaded tensor of the owner, which alone has it. Collective."""
        values = self.slice.values
        if whole is not None:
            self.slice.fill(whole)
            for replica, part in self._iter_others(whole):
                self._send(part, replica)
        elif values.numel():
            self._receive(values, self._owner)

    def as_loaded(self) -> Any:
        """Return the tensor to load, described as its weight."""
        return fill_in_place(self.as_sharded(self.allocate()))

    def as_sharded(self, tensor: torch.Tensor) -> Any:
        """Return `tensor`, described as its weight."""
        if self.key:
            sharded = make_sharded_optimizer_tensor(self.weight, tensor, self.key)
        elif isinstance(self.weight, ShardedTensor):
            sharded = replace(self.weight, data=tensor, dtype=tensor.dtype)
        else:
            sharded = replace(self.weight, data=tensor)
        return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))  # the owner has the only copy and writes it


def fill_in_place(sharded: Any) -> Any:
    """Return a tensor to load that needs no memory beside it. Halves of SwiGLU are views of it, which a load fills; Megatron would put them
    together once more, those of all layers at a time."""
    if not isinstance(sharded, ShardedTensorFactory):
        return sharded

    def merge(parts: Any) -> torch.Tensor:
        is_filled = isinstance(parts, list) and parts[0].data_ptr() == sharded.data.data_ptr()
        merged: torch.Tensor = sharded.data if is_filled else sharded.merge_fn(parts)
        return merged

    return replace(sharded, merge_fn=merge)


def _iter_weights(chunk: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, weight) for name, weight in chunk.items() if isinstance(weight, ShardedTensor | ShardedTensorFactory))


def _iter_state(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, MasterSlice]]]:
    """Yield every parameter with `exp_avg`, `exp_avg_sq`, and `master` of a 16-bit one."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for parameter, slice_ in iter_stepped(optimizer):
        moments = optimizer.optimizer.state.get(slice_.values, {})
        state = {kind: replace(slice_, values=moments.get(kind, slice_.values.new_empty(0))) for kind in MOMENTS}
        yield parameter, state | ({"master": slice_} if parameter.itemsize == 2 else {})
