"""Matrix products of a quantized linear layer, and the communication of its tensor-parallel ranks around them."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.kernels.linear.base import Backend, Operand
from megatron_rl.kernels.linear.gather import PendingOperand, can_gather, gather_first
from megatron_rl.mcore.base import two_batch
from megatron_rl.mcore.base.exchange import Exchange, Pending, begin_exchange, end_exchange, make_placeholder, pend, start_scatter
from megatron_rl.mcore.base.weight_gradient import hand_over_gradient
from megatron_rl.mcore.layers.linear.row_parallel import RowSum
from parallel.formats import BLOCK


def multiply(
    layer: Any, input: Any, weight: torch.Tensor, sum_dgrad: bool, sequence_parallel: bool, group: Any, row_sum: RowSum | None
) -> Any:
    """Return x W^T of a `QuantizedLinear`, with gradient; see `Product` for the arguments about communication. `input` is a tensor,
    `GateUp` or `Normed`; the result is a tensor or `GateUp`. The other micro-batch has its turn during communication."""
    input, gate_up = input if isinstance(input, GateUp) else (input, None)
    input, given = (input.activation, input.operand) if isinstance(input, Normed) else (input, None)
    weight = weight if torch.is_grad_enabled() else weight.detach()  # otherwise the operand for WGrad is created needlessly
    product = Product(layer, group, sum_dgrad, row_sum, defers_swiglu=layer.defers_swiglu)
    own: tuple[torch.Tensor, ...] = ()
    if sequence_parallel:
        input, own = _gather_tokens(product, input, given, weight.requires_grad)
        two_batch.give_turn()
    elif row_sum is not None and row_sum.scatter:
        product.sums = Exchange()
        two_batch.give_turn()
    rows = input.requires_grad and torch.is_grad_enabled()
    y = QuantizedMatmul.apply(input, weight, product, gate_up, given, *own)
    if product.sums is not None:
        two_batch.give_turn()
        return end_exchange(y, product.sums, partial(_start_gathering_gradient, product, rows=rows, columns=weight.requires_grad))
    return GateUp(*y) if product.defers_swiglu else y


@dataclass
class Product:
    """One use of a layer in the pass of a micro-batch, with its communication."""

    layer: Any  # a `QuantizedLinear`
    group: Any
    sum_dgrad: bool  # all-reduce x's gradient over the ranks, each of which has all tokens
    row_sum: RowSum | None
    tokens: Exchange | None = None
    """Sequence parallelism before a column-parallel layer: gathers the quantized operands, and reduce-scatters the results of DGrad."""
    column_tokens: int = 0  # number of this rank's tokens if ranks also gather bytes for WGrad; 0 if they gather x
    sums: Exchange | None = None
    """Sequence parallelism behind a row-parallel layer: reduce-scatters the results, and gathers their gradient."""
    defers_swiglu: bool = False


class QuantizedMatmul(torch.autograd.Function):
    """FProp, DGrad and WGrad. Ends the exchanges of `Product` that began before, and begins those that end later.

    The backward pass keeps WGrad's operand of x, which is smaller than x if the backend quantizes it. Under sequence parallelism, each rank
    quantizes its own tokens and gathers bytes (`kernels.linear.gather`), again for WGrad, like Megatron. If that would differ from the
    operand of the gathered x, x itself is kept and gathered. `own` holds the tensors to keep. For a layer that defers SwiGLU, the result is
    the fields of `GateUp`. If a norm has quantized its result (`Normed`), x is a placeholder and `given` its operand."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, product: Product, gate_up: torch.Tensor | None, given: Operand | None, *own: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        layer, row_sum, columns = product.layer, product.row_sum, ctx.needs_input_grad[1]
        backend = layer.backend
        ctx.product, ctx.shape = product, x.shape
        if product.tokens is not None:
            operand, saved = product.tokens.end(), own
        else:
            operand = given or _quantize(backend, x, gate_up, columns)
            saved = operand.columns
        product_of = backend.fprop if row_sum is None else partial(row_sum.multiply_operands, backend)
        y = product_of(operand, layer.operand).unflatten(-2, x.shape[:-1])
        if layer.result_order is not None:
            y = y.index_select(-1, layer.result_order[1])
        ctx.save_for_backward(weight, *saved, *([y] if product.defers_swiglu else []))
        if product.defers_swiglu:
            ctx.mark_non_differentiable(y)
            ctx.set_materialize_grads(False)  # otherwise zeros are allocated for its gradient
            return make_placeholder(y, *x.shape[:-1], y.shape[-1] // 2), y
        if row_sum is None:
            return y
        if product.sums is None:
            return row_sum.reduce(y, x.dtype)
        product.sums.begin(row_sum.start(y, x.dtype))
        return make_placeholder(x, len(x) // row_sum.group.size(), *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        product: Product = ctx.product
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        gate_up = saved.pop() if product.defers_swiglu else None
        backend, order = product.layer.backend, product.layer.result_order
        dy = dy if order is None else dy.index_select(-1, order[0])
        tokens_again = _start_gathering_again(product, tuple(saved)) if needs_dw and product.tokens else None  # overlaps with DGrad
        if product.sums is not None:
            gradient, gradient_again = product.sums.end()
        else:
            gradient, gradient_again = _quantize_gradient(product, dy, gate_up, needs_dx, needs_dw), None
        dx, dw, pending = None, None, None
        if needs_dx:
            dx = backend.dgrad(gradient, product.layer.operand).view(ctx.shape)
            if product.tokens is not None:
                product.tokens.begin(start_scatter(dx, product.group))
                dx = make_placeholder(dx, *ctx.shape)
            elif product.sum_dgrad:
                pending = dist.all_reduce(dx, group=product.group, async_op=True)
        if needs_dw:
            gradient = gradient if gradient_again is None else gradient_again()
            operand = Operand(gradient.tokens, columns=tuple(saved)) if tokens_again is None else tokens_again()
            if order is None:
                backend.wgrad(gradient, operand, weight.main_grad)  # Megatron's FP32 buffer
            else:
                weight.main_grad.index_add_(0, order[0], backend.wgrad(gradient, operand, None).to(weight.main_grad.dtype))
            dw = hand_over_gradient(weight)
        if pending is not None:
            pending.wait()
        return dx, dw, *[None] * (len(ctx.needs_input_grad) - 2)


def _quantize(backend: Any, x: torch.Tensor, gate_up: torch.Tensor | None, columns: bool) -> Operand:
    """Return the operand of x or, given gate_up, of SwiGLU's result. `columns` says that WGrad needs it."""
    if gate_up is None:
        return backend.quantize(_flatten_tokens(x), rows=True, columns=columns)
    return backend.quantize_swiglu(_flatten_tokens(gate_up), None, rows=True, columns=columns)


def _quantize_gradient(product: Product, dy: torch.Tensor, gate_up: torch.Tensor | None, rows: bool, columns: bool) -> Operand:
    """Return the operand of all tokens' gradients. Given gate_up, dy is the gradient of SwiGLU's result."""
    backend: Any = product.layer.backend
    if gate_up is not None:
        return backend.quantize_swiglu(_flatten_tokens(gate_up), _flatten_tokens(dy), rows=rows, columns=columns)
    dy = dy if product.row_sum is None else product.row_sum.take_gradient(dy)
    return backend.quantize(_flatten_tokens(dy), rows=rows, columns=columns)


def _gather_tokens(product: Product, x: torch.Tensor, given: Operand | None, trains: bool) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Start to gather the operand of all ranks' tokens. Return (placeholder, this rank's tensors to keep for WGrad)."""
    backend, tokens, group = product.layer.backend, x.shape[:-1].numel(), product.group
    gathers_columns = trains and can_gather(backend, tokens) and tokens % BLOCK == 0
    product.tokens, product.column_tokens = Exchange(), tokens * gathers_columns
    own: Operand | None = None

    def start(x: torch.Tensor) -> Pending:
        nonlocal own
        if not can_gather(backend, tokens):
            return _quantize_behind(backend, *gather_first(x, group), rows=True, columns=False)
        own = given or backend.quantize(_flatten_tokens(x), rows=True, columns=gathers_columns)
        return backend.start_gather(Operand(own.tokens, rows=own.rows), group)

    gathered = begin_exchange(x, product.tokens, start, (len(x) * group.size(), *x.shape[1:]))
    if not trains:
        return gathered, ()
    return gathered, own.columns if own is not None and gathers_columns else (x.detach(),)


def _start_gathering_again(product: Product, own: tuple[torch.Tensor, ...]) -> PendingOperand:
    """Start to gather WGrad's operand of x, or x itself, which is then quantized on arrival."""
    backend: Any = product.layer.backend
    if product.column_tokens:
        return backend.start_gather(Operand(product.column_tokens, columns=own), product.group)
    return _quantize_behind(backend, *gather_first(own[0], product.group), rows=False, columns=True)


def _start_gathering_gradient(product: Product, dy: torch.Tensor, rows: bool, columns: bool) -> Pending:
    """Start to gather the gradient of a row-parallel layer's results: returns (operand for DGrad, pending operand for WGrad or None). The
    pending operand overlaps with DGrad, if each rank has whole blocks of tokens and quantizes its own; else the first operand has both."""
    backend, row_sum, tokens = product.layer.backend, product.row_sum, dy.shape[:-1].numel()
    assert row_sum is not None
    if can_gather(backend, tokens) and backend.gathers_bytes and tokens % BLOCK == 0 and rows:
        own = backend.quantize(_flatten_tokens(dy), rows=True, columns=columns)
        of_rows = backend.start_gather(Operand(own.tokens, rows=own.rows), row_sum.group)
        of_columns = backend.start_gather(Operand(own.tokens, columns=own.columns), row_sum.group) if columns else None
        return lambda: (of_rows(), of_columns)
    pending = _quantize_behind(backend, *gather_first(dy, row_sum.group), rows=rows, columns=columns)
    return lambda: (pending(), None)


def _quantize_behind(backend: Backend, gathered: torch.Tensor, work: Any, rows: bool, columns: bool) -> PendingOperand:
    """Return a function that waits for gathered tokens [T, ...] and quantizes them."""
    finish = pend(work, gathered)
    return lambda: backend.quantize(_flatten_tokens(finish()), rows=rows, columns=columns)


def _flatten_tokens(x: torch.Tensor) -> torch.Tensor:
    """Reshape [..., h] to [T, h]."""
    return x.reshape(-1, x.shape[-1])


class GateUp(NamedTuple):
    """SwiGLU's input, passed to a layer that computes SwiGLU while it quantizes."""

    activation: torch.Tensor  # placeholder [..., F] that carries the gradient of SwiGLU's result
    gate_up: torch.Tensor  # [..., 2 F], without gradient

    @property
    def dtype(self) -> torch.dtype:
        return self.activation.dtype


@dataclass(frozen=True)
class Normed:
    """The quantized result of a norm, passed to the following layer. No tuple, since Megatron takes a norm's tuple for its result and the
    residual stream."""

    activation: torch.Tensor  # placeholder [..., h] that carries the result's gradient
    operand: Operand  # this rank's tokens as rows and, in training, columns

    @property
    def is_cuda(self) -> bool:
        return self.activation.is_cuda
