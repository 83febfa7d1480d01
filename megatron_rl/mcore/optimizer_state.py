"""The optimizer's part of a checkpoint: FP32 masters and both moments, cut as the weights they belong to, so they load into any layout.

Megatron's own `optimizer.sharded_state_dict` cannot be used: it numbers 16-bit parameters only, while the FP8 layers have FP32 ones among
them, and with experts its names depend on how many optimizers a rank has. Here a tensor's name is its weight's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerState:
    """What this rank's part of a Megatron optimizer keeps. Moments that were not made yet are made, 0.

    `sharded_model` is the model's `sharded_state_dict()`, whose tensors are the live parameters.
    """

    def __init__(self, optimizer: Any, sharded_model: dict[str, Any]) -> None:
        self._parts = optimizers(optimizer)
        kept = self._tensors()
        self._live: dict[str, torch.Tensor] = {}
        self.sharded: dict[str, Any] = {}
        """For `dist_checkpointing`: "KIND.NAME of the weight" -> float32, cut as the weight."""
        for name, weight in sharded_model.items():
            if isinstance(weight, ShardedTensor | ShardedTensorFactory):
                for kind, tensor in kept.get(id(weight.data), {}).items():
                    self._live[f"{kind}.{name}"] = tensor
                    self.sharded[f"{kind}.{name}"] = make_sharded_optimizer_tensor(weight, tensor, f"optimizer.{kind}")

    @property
    def step(self) -> int:
        """Adam's count of its steps."""
        return max((group.get("step", 0) for part in self._parts for group in part.optimizer.param_groups), default=0)

    def load(self, loaded: dict[str, torch.Tensor], step: int) -> None:
        """Takes over what `dist_checkpointing.load` gave for `sharded`."""
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(loaded[name])
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["step"] = step

    def _tensors(self) -> dict[int, dict[str, torch.Tensor]]:
        """id of a parameter -> `exp_avg`, `exp_avg_sq`, and `master` where the parameter is not its own."""
        found = {}
        for part in self._parts:
            part.init_state_fn(part.optimizer, part.config)
            parameters = {id(master): parameter for parameter, master in sixteen_bit(part)}
            for group in part.optimizer.param_groups:
                for tensor in group["params"]:
                    held = {kind: part.optimizer.state[tensor][kind] for kind in MOMENTS}
                    parameter = parameters.get(id(tensor), tensor)
                    found[id(parameter)] = held if parameter is tensor else {**held, "master": tensor}
        return found


def optimizers(optimizer: Any) -> list[Any]:
    """Those that a chained one is made of and that have parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if not part.is_stub_optimizer]


def sixteen_bit(part: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, its FP32 master) of every 16-bit parameter."""
    groups = zip(getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True)
    return [pair for parameters, masters in groups for pair in zip(parameters, masters, strict=True)]
