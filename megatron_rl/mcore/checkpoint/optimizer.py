"""The optimizer's part of a checkpoint: FP32 masters and both moments, split as the weights they belong to, so they load into any layout.

Megatron's own `optimizer.sharded_state_dict` cannot be used: it numbers 16-bit parameters only, while the FP8 layers have FP32 ones among
them, and with experts its names depend on how many optimizers a rank has. Here a tensor is named after its weight.

Ranks of a distributed optimizer hold a slice of each weight's state. For a checkpoint each weight's state is assembled on one rank, the
ranks taking turns, which writes or reads it: so no rank holds more than its share of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """This rank's part of a Megatron optimizer's state. Missing moments are created as zeros.

    `sharded_chunks` are the `sharded_state_dict()` of the model's chunks, whose tensors are the live parameters.
    """

    def __init__(self, optimizer: Any, sharded_chunks: list[dict[str, Any]]) -> None:
        self._optimizers = flatten_chained(optimizer)
        states = {id(parameter): (slice_, tensors) for part in self._optimizers for parameter, slice_, tensors in _iter_state(part)}
        self._entries: dict[str, _StateTensor] = {}
        for number, weights in enumerate(sharded_chunks):
            for name, weight in weights.items():
                if isinstance(weight, ShardedTensor | ShardedTensorFactory) and id(weight.data) in states:
                    slice_, tensors = states[id(weight.data)]
                    for kind, tensor in tensors.items():
                        entry = _StateTensor(f"optimizer.{kind}", weight, tensor)
                        if slice_ is not None:
                            entry = _SlicedStateTensor(entry.key, weight, tensor, *slice_, turn=len(self._entries))
                        self._entries[f"{kind}.{number}.{name}"] = entry

    @property
    def step(self) -> int:
        """Number of Adam's steps."""
        return max((group.get("step", 0) for part in self._optimizers for group in part.optimizer.param_groups), default=0)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors of the state, by "KIND.CHUNK.NAME of the weight"."""
        return {name: entry.tensor for name, entry in self._entries.items()}

    def sharded_for_save(self) -> dict[str, Any]:
        """Return float32 tensors split as their weights, by the same names, for `dist_checkpointing.save`. Collective."""
        gathered = {name: entry.gather() for name, entry in self._entries.items()}
        return {name: self._entries[name].as_sharded(tensor) for name, tensor in gathered.items() if tensor is not None}

    def sharded_for_load(self) -> dict[str, Any]:
        """Return the same for `dist_checkpointing.load`, which fills or replaces the tensors."""
        return {name: entry.as_sharded(entry.allocate()) for name, entry in self._entries.items() if entry.is_owner}

    def load(self, loaded: dict[str, torch.Tensor], step: int) -> None:
        """Copy in what `dist_checkpointing.load` returned for `sharded_for_load`. Collective."""
        with torch.no_grad():
            for name, entry in self._entries.items():
                entry.scatter(loaded.get(name))
        for part in self._optimizers:
            for group in part.optimizer.param_groups:
                group["step"] = step


def flatten_chained(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chained one that have parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def iter_fp32_masters(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, its FP32 master) of every 16-bit parameter; of a distributed optimizer those with a slice on this rank, which is
    the master."""
    if isinstance(optimizer, DistributedOptimizer):
        return _iter_pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)
    return _iter_pairs(getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", []))


def iter_stepped(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, _Slice | None]]:
    """Yield every parameter of one optimizer with the FP32 tensor that Adam steps for it: itself or its master, of a distributed optimizer
    this rank's slice of it, maybe empty, and what that is a slice of."""
    return (_iter_distributed if isinstance(optimizer, DistributedOptimizer) else _iter_unsharded)(optimizer)


@dataclass(frozen=True)
class _StateTensor:
    """One tensor of the state, whole on this rank."""

    key: str
    weight: Any
    tensor: torch.Tensor

    @property
    def is_owner(self) -> bool:
        """Whether this rank reads and writes the whole tensor."""
        return True

    def gather(self) -> torch.Tensor | None:
        """Return the whole tensor on its owner, None elsewhere. Collective."""
        return self.tensor

    def allocate(self) -> torch.Tensor:
        """Return the tensor to load the whole into."""
        return self.tensor

    def scatter(self, whole: torch.Tensor | None) -> None:
        """Copy in the loaded tensor of the owner. Collective."""
        self.tensor.copy_(whole)  # type: ignore[arg-type]

    def as_sharded(self, tensor: torch.Tensor) -> Any:
        """Return `tensor`, described as its weight."""
        return make_sharded_optimizer_tensor(self.weight, tensor, self.key)


@dataclass(frozen=True)
class _SlicedStateTensor(_StateTensor):
    """One tensor of the state of which each rank of `group` holds a flat slice, maybe empty; this rank's begins at `start`."""

    group: Any
    start: int
    turn: int
    """Selects the owner."""

    @property
    def _owner(self) -> int:
        return self.turn % self.group.size()

    @property
    def is_owner(self) -> bool:
        return self.group.rank() == self._owner

    def gather(self) -> torch.Tensor | None:
        whole = torch.zeros_like(self.weight.data, dtype=torch.float32)
        self._own_slice(whole).copy_(self.tensor)
        dist.reduce(whole.view(torch.int32), group_dst=self._owner, group=self.group)  # one rank's bits and zeros: exact
        return whole.cpu() if self.is_owner else None

    def allocate(self) -> torch.Tensor:
        return torch.empty(self.weight.data.shape)

    def scatter(self, whole: torch.Tensor | None) -> None:
        received = torch.empty_like(self.weight.data, dtype=torch.float32)
        if whole is not None:
            received.copy_(whole)
        dist.broadcast(received, group_src=self._owner, group=self.group)
        self.tensor.copy_(self._own_slice(received))

    def as_sharded(self, tensor: torch.Tensor) -> Any:
        sharded = super().as_sharded(tensor)
        return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))  # the owner has the only copy and writes it

    def _own_slice(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(-1)[self.start : self.start + self.tensor.numel()]


_Slice = tuple[Any, int]
"""(group of ranks that each hold a slice of a weight's state, start of this rank's)."""


def _iter_state(optimizer: Any) -> Iterator[tuple[torch.Tensor, _Slice | None, dict[str, torch.Tensor]]]:
    """Yield every parameter with `exp_avg`, `exp_avg_sq`, and `master` where the parameter is not its own."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for parameter, tensor, slice_ in iter_stepped(optimizer):
        moments = optimizer.optimizer.state.get(tensor, {})
        tensors = {kind: moments.get(kind, tensor.new_empty(0)) for kind in MOMENTS}
        yield parameter, slice_, tensors if parameter.dtype is torch.float32 else {**tensors, "master": tensor}


def _iter_unsharded(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, _Slice | None]]:
    parameters = {id(master): parameter for parameter, master in iter_fp32_masters(optimizer)}
    for group in optimizer.optimizer.param_groups:
        for tensor in group["params"]:
            yield parameters.get(id(tensor), tensor), tensor, None


def _iter_distributed(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, _Slice | None]]:
    # not by Megatron's `model_param_group_index_map`: where FP32 and 16-bit parameters are mixed, it points to others
    fp32_pairs = _iter_pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    slices = {id(parameter): tensor for parameter, tensor in (*iter_fp32_masters(optimizer), *fp32_pairs)}
    for parameter in (parameter for buffer in optimizer.buffers for parameter in buffer.params):
        tensor, start = slices.get(id(parameter)), 0
        if tensor is None:
            tensor = torch.empty(0, device=parameter.device)
        else:
            start = optimizer._get_model_param_range_map(parameter)["param"].start
        yield parameter, tensor, (optimizer.data_parallel_group, start)


def _iter_pairs(groups: Any, others: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the members of two lists of groups side by side."""
    return (pair for members, partners in zip(groups, others, strict=True) for pair in zip(members, partners, strict=True))
