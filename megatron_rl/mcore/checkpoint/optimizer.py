"""The optimizer's part of a checkpoint: FP32 masters and both moments, cut as the weights they belong to, so they load into any layout.

Megatron's own `optimizer.sharded_state_dict` cannot be used: it numbers 16-bit parameters only, while the FP8 layers have FP32 ones among
them, and with experts its names depend on how many optimizers a rank has. Here a tensor's name is its weight's.

Ranks of a distributed optimizer hold some places of each weight's state. For a checkpoint the state is put together weight by weight, on
the ranks in turn, which write and read it: so nobody holds more than its share of the whole.
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
_Weight = ShardedTensor | ShardedTensorFactory


class OptimizerState:
    """What this rank's part of a Megatron optimizer keeps. Moments that were not made yet are made, 0.

    `sharded_chunks` are the `sharded_state_dict()` of the model's chunks, whose tensors are the live parameters.
    """

    def __init__(self, optimizer: Any, sharded_chunks: list[dict[str, Any]]) -> None:
        self._parts = flatten_chained(optimizer)
        kept = {id(parameter): (share, tensors) for part in self._parts for parameter, share, tensors in _iter_state(part)}
        self._entries: dict[str, _StateTensor] = {}
        for number, weights in enumerate(sharded_chunks):
            for name, weight in weights.items():
                if isinstance(weight, ShardedTensor | ShardedTensorFactory) and id(weight.data) in kept:
                    share, tensors = kept[id(weight.data)]
                    for kind, tensor in tensors.items():
                        self._entries[f"{kind}.{number}.{name}"] = _StateTensor(
                            f"optimizer.{kind}", weight, tensor, share, len(self._entries)
                        )

    @property
    def step(self) -> int:
        """Adam's count of its steps."""
        return max((group.get("step", 0) for part in self._parts for group in part.optimizer.param_groups), default=0)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the state, by "KIND.CHUNK.NAME of the weight"."""
        return {name: entry.tensor for name, entry in self._entries.items()}

    def sharded_for_save(self) -> dict[str, Any]:
        """For `dist_checkpointing.save`: by the same names float32, cut as the weight. Collective."""
        whole = {name: entry.gather() for name, entry in self._entries.items()}
        return {name: self._entries[name].as_sharded(tensor) for name, tensor in whole.items() if tensor is not None}

    def sharded_for_load(self) -> dict[str, Any]:
        """The same for `dist_checkpointing.load`, which fills the tensors or gives others."""
        return {name: entry.as_sharded(entry.allocate()) for name, entry in self._entries.items() if entry.is_owner}

    def load(self, loaded: dict[str, torch.Tensor], step: int) -> None:
        """Takes over what `dist_checkpointing.load` gave for `sharded_for_load`. Collective."""
        with torch.no_grad():
            for name, entry in self._entries.items():
                entry.scatter(loaded.get(name))
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["step"] = step


def flatten_chained(optimizer: Any) -> list[Any]:
    """Those that a chained one is made of and that have parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def iter_fp32_masters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, its FP32 master) of every 16-bit parameter; of a distributed optimizer those with places on this rank, which are the
    master."""
    if isinstance(part, DistributedOptimizer):
        return _pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups)
    return _pairs(getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []))


@dataclass(frozen=True)
class _ShardGroup:
    """Ranks that hold some places each of one weight's state; this one from place number `start` on."""

    group: Any
    start: int


@dataclass(frozen=True)
class _StateTensor:
    """One tensor of the state: `tensor` is all of it, or where ranks `share` it, flat, this rank's places, which may be none. Among those
    the one whose `owner` it is has it whole for a checkpoint."""

    key: str
    weight: Any
    tensor: torch.Tensor
    share: _ShardGroup | None
    owner: int

    @property
    def is_owner(self) -> bool:
        return self.share is None or self.share.group.rank() == self.owner % self.share.group.size()

    def gather(self) -> torch.Tensor | None:
        """On the rank whose turn it is, all of it. Collective."""
        if self.share is None:
            return self.tensor
        whole = torch.zeros_like(self.weight.data, dtype=torch.float32)
        self._own_places(whole).copy_(self.tensor)
        group = self.share.group
        dist.reduce(whole.view(torch.int32), group_dst=self.owner % group.size(), group=group)  # one rank's bits and zeros: exact
        return whole.cpu() if self.is_owner else None

    def allocate(self) -> torch.Tensor:
        """Where all of it is loaded to."""
        return self.tensor if self.share is None else torch.empty(self.weight.data.shape)

    def scatter(self, whole: torch.Tensor | None) -> None:
        """Gives every rank its places of what was loaded by the one whose turn it is. Collective."""
        if self.share is None:
            self.tensor.copy_(whole)  # type: ignore[arg-type]
            return
        told = torch.empty_like(self.weight.data, dtype=torch.float32)
        if whole is not None:
            told.copy_(whole)
        group = self.share.group
        dist.broadcast(told, group_src=self.owner % group.size(), group=group)
        self.tensor.copy_(self._own_places(told))

    def _own_places(self, whole: torch.Tensor) -> torch.Tensor:
        start = 0 if self.share is None else self.share.start
        return whole.view(-1)[start : start + self.tensor.numel()]

    def as_sharded(self, tensor: torch.Tensor) -> Any:
        """`tensor` told as the weight is. Where ranks share it, there is no second copy: the one that has it writes it."""
        found = make_sharded_optimizer_tensor(self.weight, tensor, self.key)
        return found if self.share is None else replace(found, replica_id=(*found.replica_id[:-1], 0))


def _iter_state(part: Any) -> Iterator[tuple[torch.Tensor, _ShardGroup | None, dict[str, torch.Tensor]]]:
    """Every parameter with `exp_avg`, `exp_avg_sq`, and `master` where the parameter is not its own."""
    part.init_state_fn(part.optimizer, part.config)
    for parameter, tensor, share in _iter_distributed(part) if isinstance(part, DistributedOptimizer) else _iter_unsharded(part):
        moments = part.optimizer.state.get(tensor, {})
        tensors = {kind: moments.get(kind, tensor.new_empty(0)) for kind in MOMENTS}
        yield parameter, share, tensors if parameter.dtype is torch.float32 else {**tensors, "master": tensor}


def _iter_unsharded(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, None]]:
    """(parameter, what Adam steps: itself or its FP32 master, None)."""
    parameters = {id(master): parameter for parameter, master in iter_fp32_masters(part)}
    for group in part.optimizer.param_groups:
        for tensor in group["params"]:
            yield parameters.get(id(tensor), tensor), tensor, None


def _iter_distributed(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, _ShardGroup]]:
    """(parameter, this rank's FP32 places of it, where they are), of all parameters.

    Not by Megatron's `model_param_group_index_map`: where FP32 and 16-bit parameters are mixed, it points to others."""
    own = _pairs(part.model_fp32_groups, part.shard_fp32_groups)
    places = {id(parameter): tensor for parameter, tensor in (*iter_fp32_masters(part), *own)}
    for parameter in (parameter for buffer in part.buffers for parameter in buffer.params):
        tensor, start = places.get(id(parameter)), 0
        if tensor is None:
            tensor = torch.empty(0, device=parameter.device)
        else:
            start = part._get_model_param_range_map(parameter)["param"].start
        yield parameter, tensor, _ShardGroup(part.data_parallel_group, start)


def _pairs(groups: Any, others: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Members of groups of groups, side by side."""
    return (pair for members, partners in zip(groups, others, strict=True) for pair in zip(members, partners, strict=True))
