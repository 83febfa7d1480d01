"""One table of operators for all estimates: what each operator of a layer keeps for the backward pass, moves, and multiplies on one rank.

Symbols: T tokens of a micro-batch on a rank; S = T / tp rows of the residual stream under sequence parallelism, else T; h the hidden size;
q and kv the widths of a rank's query and key heads; f the rank's MLP width; R = S top_k etp rows of its experts; b bytes of the high dtype;
g = 1 + 4/128 bytes of a quantized element, or b; w = g, or 2 g in training, which also quantizes columns for WGrad.

Activations kept (`Operator.kept`) count a tensor once, even if two operators keep it. Attention is fused, so no scores are kept.

Bytes moved (`Operator.forward`, `Operator.backward`) are the least that element-wise kernels can move, as if all of them between two matrix
products (attention counts as one) were fused: the fused kernel reads the output of one product and writes the input of the next. Routers,
biases and statistics are not included.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron_rl.cost.workload import Workload
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import BLOCK
from parallel.layout import Layout


class Operator(NamedTuple):
    """Cost of one operator for a micro-batch on one rank, in bytes."""

    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class RankShapes:
    """The quantities that the formulas use, for one rank of a layout."""

    job: Workload
    layout: Layout
    tokens: float
    """T."""
    cpu: bool = False
    """Whether the CPU tier's operators run: norms keep FP32 copies, and attention keeps no statistics."""
    trains: bool = True
    """Whether the forward pass prepares a backward pass."""

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks shard the tokens of norms and residuals. Megatron's experts require it."""
        return self.layout.tp > 1 and (self.job.model.experts is not None or self.job.config.train.layout.sequence_parallel)

    @cached_property
    def rows(self) -> float:
        """S."""
        return self.tokens / self.layout.tp if self.sequence_parallel else self.tokens

    @cached_property
    def routed_rows(self) -> float:
        """R, with a balanced router."""
        return self.rows * self.job.top_k * self.layout.etp

    @cached_property
    def expert_rows(self) -> float:
        """Rows that the experts compute. Grouped products pad the rows of each expert to a multiple of 128."""
        if self.job.model.experts is None or not self.quantizes_gradients or self.job.contract.sums_by_tree:
            return self.routed_rows
        local = self.job.model.experts.count / self.layout.ep
        return local * math.ceil(self.routed_rows / local / BLOCK) * BLOCK

    @cached_property
    def quantizes_gradients(self) -> bool:
        return self.job.contract.trainer_format.quantized and self.job.config.precision.backend != "emulated"

    @cached_property
    def quantizes_inputs(self) -> bool:
        """Whether linear layers keep a quantized copy of their input instead of the input itself."""
        return self.quantizes_gradients and not self.job.trains_adapters

    @cached_property
    def linear_input_bytes(self) -> float:
        """Bytes per element that a linear layer keeps of its own input."""
        return self.job.contract.trainer_format.group_bytes if self.quantizes_inputs else self.job.high_bytes

    def kept_input_bytes(self, layer: str) -> float:
        """Return `linear_input_bytes` for Megatron's layer of this name; 0 if the layer is frozen and has no adapter."""
        adapters = self.job.model.adapters
        return 0.0 if adapters is not None and layer not in adapters.targets else self.linear_input_bytes

    @cached_property
    def operand_bytes(self) -> float:
        """w."""
        return (2 if self.trains and self.quantizes_inputs else 1) * quantized_bytes(self.job)

    @cached_property
    def hidden_input(self) -> float:
        """Bytes of the residual stream."""
        return self.rows * self.job.model.hidden * self.job.high_bytes


def quantized_bytes(job: Workload) -> float:
    """Return g."""
    format = job.contract.trainer_format
    return format.group_bytes if format.quantized else job.high_bytes


def list_mlp_operators(shapes: RankShapes, has_experts: bool) -> Iterator[Operator]:
    """Yield the operators of a layer's MLP or experts, and of the layer's adapters."""
    model, layout, h = shapes.job.model, shapes.layout, shapes.job.model.hidden
    yield Operator(_adapter_bytes(shapes, has_experts))
    if not has_experts:
        yield Operator(column_input(shapes, h, "linear_fc1"))
        yield _swiglu(shapes, shapes.tokens, shapes.tokens, model.ffn / layout.tp)
        return
    experts, b, w, S, R = model.experts, shapes.job.high_bytes, shapes.operand_bytes, shapes.rows, shapes.routed_rows
    assert experts is not None
    yield Operator(S * (h * b + 5 * experts.count + 12 * shapes.job.top_k))  # the router's input, weights and choices
    sent = b if shapes.trains else quantized_bytes(shapes.job)  # training sends the high dtype, of which it quantizes columns
    forward = S * h * sent + R * h * sent + R * h * (sent + w) + R * h * 2 * b + R * h * b + S * h * b  # send, sort, weigh, return
    backward = S * h * b + R * h * b + R * h * (2 * b + w) + R * h * b + S * h * b + R * h * 2 * b
    kept = shapes.expert_rows * (h * (shapes.kept_input_bytes("linear_fc1") + b) + 12)  # and outputs, for their weights' gradient
    yield Operator(kept, forward, backward)
    yield _swiglu(shapes, shapes.expert_rows, R, experts.ffn / layout.etp)
    if experts.shared_ffn:
        yield _swiglu(shapes, shapes.tokens, shapes.tokens, experts.shared_ffn / layout.tp)
    if experts.shared_gate:  # keeps what it multiplies, on a CPU in FP32
        yield Operator(S * (h * (4 if shapes.cpu else b) + 4), S * h * 2 * b, S * h * 4 * b)


def _swiglu(shapes: RankShapes, padded_rows: float, rows: float, ffn: float) -> Operator:
    """SwiGLU, which keeps gate and up, the input of the next layer, and on a CPU, unless it clamps them, silu(gate) and a copy of up."""
    b, w, experts = shapes.job.high_bytes, shapes.operand_bytes, shapes.job.model.experts
    copies = shapes.cpu and not (experts and experts.swiglu_limit)
    kept = padded_rows * ffn * ((4 if copies else 2) * b + shapes.kept_input_bytes("linear_fc2"))
    return Operator(kept, rows * ffn * (2 * b + w), rows * ffn * (3 * b + 2 * w))


def norm_bytes(shapes: RankShapes, rows: float, width: float, own_input: bool = True) -> float:
    """Return the bytes that a norm keeps. `own_input`: whether no other operator keeps its input."""
    if shapes.cpu:  # FP32 input, the input itself unless it is FP32 and kept elsewhere, and the normalized value
        return rows * (width * (4 + (4 if own_input or shapes.job.high_bytes < 4 else 0)) + 4)
    return rows * ((width * shapes.job.high_bytes if own_input else 0) + 4)


def column_input(shapes: RankShapes, width: float, layer: str) -> float:
    """Return what a column-parallel layer keeps: under sequence parallelism the rank's shard of the unquantized input."""
    return shapes.rows * width * (shapes.job.high_bytes if shapes.sequence_parallel else shapes.kept_input_bytes(layer))


def row_input(shapes: RankShapes, width: float) -> float:
    """Return what a row-parallel layer keeps in addition to the tensor that the producer of its input keeps."""
    return shapes.tokens * width * shapes.linear_input_bytes if shapes.quantizes_inputs else 0


def _adapter_bytes(shapes: RankShapes, has_experts: bool) -> float:
    """Return the bytes of the low-rank activations of a layer's adapters."""
    adapters, job = shapes.job.model.adapters, shapes.job
    if adapters is None:
        return 0
    experts = shapes.routed_rows if has_experts else 0
    shared = shapes.tokens if job.model.experts is None or not has_experts or job.model.experts.shared_ffn else 0
    tokens = sum(shapes.tokens if target in ("linear_qkv", "linear_proj") else experts + shared for target in adapters.targets)
    return tokens * adapters.rank * job.high_bytes


class TokenFlops(NamedTuple):
    """Forward FLOPs of one token in the whole model."""

    linear: float
    """Linear layers that the precision contract quantizes."""
    attention: float
    """Causal attention over sequences of mean length, and the states of linear attention."""
    output: float
    """The output layer."""


@lru_cache(maxsize=32)
def count_flops_per_token(job: Workload) -> TokenFlops:
    model = job.model
    attention = sum(kind.count_positions(job.mean_sequence) * kind.flops_per_position + kind.flops_per_token for kind in model.attention)
    return TokenFlops(count_linear_flops(job, QUANTIZED_ROLES), attention, 2 * (1 if model.value_head else model.vocab) * model.hidden)


@lru_cache(maxsize=32)
def count_linear_flops(job: Workload, roles: frozenset[str], only_experts: bool = False) -> float:
    """Return the forward FLOPs of a token in the layers of these roles: 2 for each weight that the token meets."""
    share = job.top_k / job.model.experts.count if job.model.experts else 1.0
    return sum(
        2 * rect.rows * rect.cols * (1 if weight.expert is None else share)
        for weight in itertools.chain(*job.scored.model.list_weights())
        for tensor, rect, *_ in weight.pieces
        if tensor.role in roles and (weight.expert is not None or not only_experts)
    )
