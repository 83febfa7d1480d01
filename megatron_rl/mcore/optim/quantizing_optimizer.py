"""Megatron's distributed optimizer, extended to parameters stored as FP8 blocks.

Each data-parallel replica steps a flat slice of every parameter buffer. Megatron supports 16-bit parameters with FP32 masters, and FP32
parameters. For E4M3 parameters, Adam steps the slice of the FP32 master as usual; instead of a cast, then

    each replica finds the block maxima in its slices             `kernels.slices`
    one all-reduce takes the maximum over replicas                4 bytes per block
    each replica quantizes its slices into the parameter buffer   the maxima determine the scales on all replicas
    Megatron's all-gather distributes the bytes                   1 byte per parameter
"""

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_rl.distributed import raise_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.kernels.slices import WeightSlice
from megatron_rl.kernels.slices.reference import find_maxima, quantize_slice
from megatron_rl.mcore.base.master_slices import MasterSlice, flatten_chained, make_slice
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear
from megatron_rl.mcore.optim.buckets import start_gathers
from megatron_rl.mcore.platform import cpu
from megatron_rl.precision.quantizers import make_scales
from parallel.digest import digest
from parallel.shards import Rect


def install() -> None:
    """Make Megatron build `QuantizingOptimizer` as its distributed optimizer."""
    cpu.check_version()
    import megatron.core.optimizer as optimizer

    optimizer.DistributedOptimizer = QuantizingOptimizer


class _Slice(NamedTuple):
    name: str
    layer: QuantizedLinear
    master: MasterSlice
    place: WeightSlice
    digest: str  # hash of the initial master of a weight with adopted blocks, else ""

    @property
    def bytes(self) -> torch.Tensor:
        """This rank's slice of the weight's bytes in the parameter buffer."""
        return self.layer.weight.data.view(-1)[self.master.start : self.master.start + self.master.values.numel()]


class QuantizingOptimizer(DistributedOptimizer):
    """Distributed optimizer whose one-byte parameters are quantized weights. Call `take_layers` before the first step."""

    def __init__(self, optimizer: Any, *args: Any, **options: Any) -> None:
        for group in optimizer.param_groups if optimizer is not None else ():
            for parameter in filter(is_quantized, group["params"]):
                parameter.main_param, parameter.main_param_sharded = None, True
        super().__init__(optimizer, *args, **options)
        self._slices: list[_Slice] = []
        self.maxima = torch.zeros(0)

    @classmethod
    def _build_model_and_main_param_groups(
        cls, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: list[dict[str, Any]], config: Any
    ) -> Any:
        """Add slices of FP32 masters for quantized parameters to Megatron's groups, in model order: the gradient norm is summed in it."""
        in_order = [group["orig_group"]["params"] for group in opt_group_ranges]
        others = [{**group, "params": [each for each in group["params"] if not is_quantized(each)]} for group in opt_group_ranges]
        groups = super()._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, others, config)
        halves, singles, _, own_slices, masters = groups
        for number, (group, parameters) in enumerate(zip(opt_group_ranges, in_order, strict=True)):
            pairs = (*zip(halves[number], masters[number], strict=True), *zip(singles[number], own_slices[number], strict=True))
            stepped = {id(each): slice_ for each, slice_ in pairs}
            for parameter in filter(is_quantized, group["params"]):
                index, dtype, bucket = param_gbuf_map[parameter]
                size = gbuf_ranges[index][dtype][bucket]["param_map"][parameter]["param"].size
                master = torch.empty(size, dtype=torch.float32, device=parameter.device)
                tensor_parallel.copy_tensor_model_parallel_attributes(master, parameter)
                master.shared = getattr(parameter, "shared", False)  # type: ignore[attr-defined]
                parameter.main_param = stepped[id(parameter)] = master
            group["orig_group"]["params"] = [stepped[id(each)] for each in parameters if id(each) in stepped]
        return groups

    @property
    def masters(self) -> list[tuple[Any, torch.Tensor]]:
        """(parameter, slice of its FP32 master) of the quantized parameters with a slice on this rank."""
        if self.is_stub_optimizer:
            return []
        parameters = (parameter for buffer in self.buffers for parameter in buffer.params)
        return [(each, each.main_param) for each in parameters if is_quantized(each) and each.main_param is not None]

    def take_layers(self, layers: dict[str, QuantizedLinear]) -> None:
        """Fill this rank's master slices for those of the named layers whose weights are in this optimizer, one layer at a time."""
        by_weight = {id(layer.weight): (name, layer) for name, layer in layers.items()}
        quantized = [(each, parameter) for each in self.buffers for parameter in each.params if is_quantized(parameter)]
        for buffer, parameter in quantized:
            name, layer = by_weight[id(parameter)]
            master, (rows, cols) = make_slice(self, buffer, parameter, parameter.main_param), parameter.shape
            layer.take_slice(master)
            order = None if layer.row_order is None else layer.row_order.to(parameter.device)
            place = WeightSlice(rows, cols, master.start, layer.format, order)
            self._slices.append(_Slice(name, layer, master, place, _hash(master.values) if layer.adopted else ""))

    def step_with_ready_grads(self) -> bool:
        """Step the masters and quantize them. The caller gathers the weights: Megatron would gather once per chained optimizer."""
        return super(DistributedOptimizer, self).step_with_ready_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for _, master in self.masters:
            master.grad = None

    def _copy_model_grads_to_main_grads(self) -> None:
        super()._copy_model_grads_to_main_grads()
        for parameter, master in self.masters:
            part = self._get_model_param_range_map(parameter)["param"]
            master.grad = parameter.main_grad.view(-1)[part.start : part.end]

    def _copy_main_params_to_model_params(self) -> None:
        super()._copy_main_params_to_model_params()
        self.quantize()

    @torch.no_grad()
    def quantize(self) -> None:
        """Compute all scales and quantize this rank's slices. Collective over the replicas. Does not wait for the device unless some blocks
        are adopted; these are kept until their master has changed on any replica."""
        if not self._slices:
            return
        grids = [find_maxima(each.master.values, each.place) for each in self._slices]
        changed = [float(not each.layer.adopted or _hash(each.master.values) != each.digest) for each in self._slices]
        flat = torch.cat([*(grid.view(-1) for grid in grids), grids[0].new_tensor(changed)])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self.data_parallel_group)
        self.maxima, flags = flat[: -len(changed)], flat[-len(changed) :]
        keep = flags.logical_not().tolist() if any(each.layer.adopted for each in self._slices) else [False] * len(changed)
        sizes = [grid.numel() for grid in grids]
        scales, multipliers = (values.split(sizes) for values in make_scales(self.maxima, self._slices[0].layer.format))
        for each, grid, scale, multiplier, kept in zip(self._slices, grids, scales, multipliers, keep, strict=True):
            each.layer.adopted = kept
            if not kept:
                each.layer.set_scale(scale.view(grid.shape))
                quantize_slice(each.master.values, each.place, multiplier.view(grid.shape), each.bytes)

    @torch.no_grad()
    def find_unmade(self, chosen: Set[int]) -> list[str]:
        """Return the weights among those with these parameters' ids whose live blocks are not those of the masters, with the first block of
        this rank's slice. Adopted blocks are not recomputed. Collective over the replicas."""
        slices = [each for each in self._slices if id(each.layer.weight) in chosen and not each.layer.adopted]
        found = []
        for each in slices:
            maxima = find_maxima(each.master.values, each.place)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.data_parallel_group)
            scale, multipliers = make_scales(maxima, each.layer.format)
            quantize_slice(each.master.values, each.place, multipliers, made := torch.empty_like(each.bytes))
            line = f"{each.name}: the blocks that the trainer computes with and sends were not made from the FP32 masters"
            if bool((wrong := made.view(torch.uint8) != each.bytes.view(torch.uint8)).any()):
                row, column = divmod(each.master.start + int(wrong.nonzero()[0]), each.place.cols)
                found.append(f"{line}, first in the block of row {row}, column {column}")
            elif not torch.equal(scale.to(each.layer.scale.dtype), each.layer.scale):
                row, column = (scale != each.layer.scale).nonzero()[0].tolist()
                found.append(f"{line}: the scale of block ({row}, {column}) differs")
        return found

    def find_broken(self) -> str:
        """Return the name of the first weight with inf or NaN in its last quantization, or "". Waits for the device."""
        sizes = [each.layer.scale.numel() for each in self._slices]
        parts = zip(self._slices, self.maxima.split(sizes), strict=True)
        return next((each.name for each, maxima in parts if not bool(maxima.isfinite().all())), "")


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a parameter holds quantized bytes."""
    return parameter.itemsize == 1


def requantize(optimizer: Any) -> None:
    """Quantize masters that were set from outside, on every replica. Collective."""
    parts = flatten_chained(optimizer)
    for part in parts:
        part.quantize()
    check_finite(parts)
    wrapped = {id(chunk): chunk for part in parts for chunk in part.model_chunks}
    start_gathers(wrapped.values())


def check_finite(optimizers: Iterable[QuantizingOptimizer]) -> None:
    """Raise RunError on every rank if a quantized weight holds inf or NaN; the message names it. Collective; waits once for the device."""
    parts = list(optimizers)
    broken = torch.zeros((), device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
    for part in parts:
        broken = torch.maximum(broken, part.maxima.isfinite().all().logical_not().to(broken))
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    if float(broken):
        name = next(filter(None, (part.find_broken() for part in parts)), "")
        line = f"{name}: weight holds inf or NaN; the step is stopped before it reaches the engine"
        raise_on_all_ranks(RunError(line) if name else None)


def _hash(values: torch.Tensor) -> str:
    return digest(values.detach().view(1, -1), Rect(0, 0, 1, values.numel())) if values.numel() else ""
