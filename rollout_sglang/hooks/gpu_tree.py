"""Row-parallel layers of the engine on an NVIDIA GPU by the trainer's tree: our Triton kernels in place of SGLang's products, its own
collectives in place of its all-reduce. Shapes are static and nothing waits for the GPU, so CUDA graphs capture it."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.kernels.sums import reference as tree
from rollout_sglang.hooks import gpu_activation_quant


def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's sums float32 [T, N] of x [T, K / tp], quantised by the contract where the live layer's weight is.

    `gpu_activation_quant.read_linear_scale_format` has refused layers whose weight or scales SGLang holds in another form.
    """
    if not isinstance(x, torch.Tensor):
        raise NotImplementedError("the input of a row-parallel layer that SGLang quantised before is outside the precision contract")
    if type(layer.quant_method).__name__ == "UnquantizedLinearMethod":
        return tree.multiply(x, layer.weight)
    rows = gpu_activation_quant.quantize_groups(x.contiguous(), column_major_scales=True)
    return tree.multiply_blocks(rows, (layer.weight, layer.weight_scale_inv))


class CapturedGroup:
    """One of SGLang's groups of ranks, as `tree.reduce` takes a group and `torch.distributed`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.world_size

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: CapturedGroup) -> None:
        self._group.all_gather_into_tensor(output, input)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor, group: CapturedGroup) -> None:
        self._group.all_to_all_single(output, input)
