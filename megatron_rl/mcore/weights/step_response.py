"""The step response: how far an optimizer step moved the engine's weights, relative to the movement of their FP32 masters.

    response = sum |dQ| / sum |dM|        changed_share = mean of [dQ != 0]

Q is a weight's value in the engine (FP8 block, INT8 row or BF16), M its FP32 master. Rounding maps all M in a cell of width c to one Q.
If M is uniformly distributed in its cell, a step |dM| < c crosses a boundary with probability |dM| / c and then moves Q by c, so that
E |dQ| = |dM| and the response is 1 for any grid. It is far above 1 if masters are concentrated at cell boundaries (1 in 16 BF16 weights
is a tie in E4M3), and 0 if they are at cell centers.

The estimate uses a random sample of strips (`_ROWS` rows of a weight, in quantized order, so that blocks stay whole), drawn per step
without replacement. All strips are equally likely, so sums over the sample times strips / sample are unbiased. A rank keeps about
`_ELEMENTS` values during a step.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.mcore.base.master_slices import flatten_chained, iter_stepped
from megatron_rl.mcore.base.names import ModelChunks
from megatron_rl.mcore.layers.linear.quantized_linear import WeightLayer, reorder_rows
from megatron_rl.mcore.optim.buckets import finish_gathers
from megatron_rl.mcore.weights.load_weights import find_weight_layers, quantize_rows
from megatron_rl.metrics import declare
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize
from megatron_rl.precision.threads import single_threaded

_ROWS = 128  # rows of a strip, a multiple of every block height
_ELEMENTS, _MIN_STRIPS = 1 << 20, 8  # size of a sample
_BELOW = 'masters at cell centers that the learning rate cannot leave (a quantized checkpoint with precision.masters = "stored")'
_ABOVE = 'masters at cell boundaries (a BF16 checkpoint with precision.masters = "stored", or one computed from rounded values)'
RESPONSE = declare(
    "precision/response",
    "movement of the engine's weights in a step over the movement of their masters",
    "number",
    "engine's weights moved / masters moved",
    label="response",
    expected=(0.5, 2.0),
    causes=(_BELOW, _ABOVE),
)
CHANGED = declare("precision/changed_share", "share of the engine's quantized values that the step changed", "share", "values changed")


class _Strip(NamedTuple):
    layer: WeightLayer
    first: int  # first row, in quantized order


class StepResponse:
    """Measures optimizer steps: call `begin` before a step and `end` after the weights are quantized. Both are collective. Measures nothing
    if the engine holds the masters themselves (mode `bf16` with `high = "fp32"`)."""

    def __init__(self, chunks: ModelChunks, optimizer: Any) -> None:
        self._chunks = chunks
        layers = find_weight_layers(chunks).values()
        formats = [(layer, layer.engine_format) for layer in layers if layer.engine_format and layer.weight.requires_grad]
        measured = [layer for layer, format in formats if format.quantized or layer.weight.dtype is not torch.float32]
        self._strips = [_Strip(layer, first) for layer in measured for first in range(0, len(layer.weight), _ROWS)]
        largest = max((layer.weight[:_ROWS].numel() for layer in measured), default=1)
        self._size = min(max(_ELEMENTS // largest, _MIN_STRIPS), len(self._strips))
        stepped = [entry for part in flatten_chained(optimizer) for entry in iter_stepped(part)]
        self._masters = {id(weight): master for weight, master in stepped}
        self._held: dict[_Strip, list[tuple[slice, slice]]] = {}
        self._sample: list[tuple[_Strip, torch.Tensor, torch.Tensor]] = []

    def begin(self, step: int) -> None:
        """Draw the sample of optimizer step `step`, the same on all ranks that share rows, and record its values."""
        drawn = torch.randperm(len(self._strips), generator=torch.Generator().manual_seed(step))[: self._size].tolist()
        self._sample = [(strip, *self._read(strip)) for strip in (self._strips[index] for index in drawn)]

    def end(self) -> dict[str, float]:
        """Return the metrics, the same on all ranks; {} if no master moved."""
        if any(strip.layer.blocks is None for strip, *_ in self._sample):
            finish_gathers(self._chunks)  # weights without blocks are quantized here, so they must be whole
        sums = torch.zeros(4, dtype=torch.float64, device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu")
        for strip, engine, master in self._sample:
            new_engine, new_master = self._read(strip)
            moved, stepped = (new_engine - engine).abs_(), (new_master - master).abs_()
            with single_threaded():  # the sums are the same with any number of threads
                of_strip = torch.stack([moved.sum(), (moved != 0).sum(), moved.new_full((), moved.numel()), stepped.sum()]).double()
            weight: Any = strip.layer.weight
            is_cut = getattr(weight, "tensor_model_parallel", False) or not getattr(weight, "allreduce", True)
            copies = 1 if is_cut else parallel_state.get_tensor_model_parallel_world_size()  # tensor-parallel ranks with the whole weight
            sums += of_strip / copies * (len(self._strips) / len(self._sample))
        self._sample = []
        dist.all_reduce(sums)
        moved_sum, changed, values, stepped_sum = sums.tolist()
        return {RESPONSE: moved_sum / stepped_sum, CHANGED: changed / values} if stepped_sum else {}

    def _read(self, strip: _Strip) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (engine values, masters), both float32 [n], in this rank's slice of the weight. Does not wait for the device. This rank's
        slice of the new blocks is valid before the other replicas' slices are gathered."""
        master, engine = self._masters[id(strip.layer.weight)], _read_engine(strip).flatten()
        if strip not in self._held:
            self._held[strip] = [*_find_held(strip, master)] or [(slice(0, 0), slice(0, 0))]
        held = self._held[strip]
        values = master.values.detach()
        return torch.cat([engine[places] for places, _ in held]), torch.cat([values[places] for _, places in held])


def _find_held(strip: _Strip, master: Any) -> Iterator[tuple[slice, slice]]:
    """Yield (slice of the strip, slice of the master) of each run of values in this rank's slice of the weight."""
    (rows, width), order, at = strip.layer.weight.shape, strip.layer.row_order, 0
    numbers = range(strip.first, min(strip.first + _ROWS, rows)) if order is None else order[strip.first : strip.first + _ROWS].tolist()
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):  # consecutive rows
        (_, row), *others = run
        low, high = max(row * width, master.start), min((row + 1 + len(others)) * width, master.start + master.values.numel())
        if low < high:
            to_strip = (at - row) * width
            yield slice(low + to_strip, high + to_strip), slice(low - master.start, high - master.start)
        at += 1 + len(others)


def _read_engine(strip: _Strip) -> torch.Tensor:
    """Return the engine's values of a strip, float32 [rows, K]; NaN if a weight that must be quantized holds inf or NaN. Collective if
    whole rows share a scale and ranks hold different columns of them."""
    layer, first, format, order = strip.layer, strip.first, strip.layer.engine_format, strip.layer.row_order
    assert format is not None
    weight, places = layer.weight.detach(), slice(first, first + _ROWS)
    rows = weight[places] if order is None else reorder_rows(weight, order[places])
    if layer.blocks is not None and layer.format == format:
        assert format.block is not None
        height = format.block[0]
        return dequantize(QuantizedWeight(rows, layer.blocks.scale[first // height : -(-(first + len(rows)) // height)]), format)
    if not format.quantized:
        return rows.float()
    try:
        return dequantize(quantize_rows(rows, format, layer.tp_group if layer.is_cut_by_columns else None), format)
    except ValueError:
        return torch.full_like(rows, torch.nan, dtype=torch.float32)
