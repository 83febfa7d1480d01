"""Communication that overlaps with computation, in forward and backward passes.

For autograd, an exchange has two steps, begin and end, joined by a placeholder tensor. The gradient's exchange begins where the forward
one ends. A matrix product may take over one of the steps (`quantized_matmul`): a column-parallel product waits for its tokens, and starts
to reduce their gradient before it computes the weight's; a row-parallel product does the reverse.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.mcore.base import two_batch

Pending = Callable[[], Any]  # waits for an exchange and returns its result
Start = Callable[[torch.Tensor], Pending]


def make_placeholder(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor of the given shape with the memory of a single element, which is never read."""
    return like.new_empty(1).expand(*shape)


class Exchange:
    """A pending exchange; at most one at a time per direction."""

    _pending: Pending | None = None

    def begin(self, pending: Pending) -> None:
        assert self._pending is None, "the exchange before was not waited for"
        self._pending = pending

    def end(self) -> Any:
        """Wait for the exchange and return its result."""
        pending, self._pending = self._pending, None
        assert pending is not None, "no exchange has begun"
        return pending()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, start: Start, shape: Sequence[int]) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.begin(start(x))
        return make_placeholder(x, *shape)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return ctx.exchange.end(), None, None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, start: Start) -> torch.Tensor:
        ctx.exchange, ctx.start, ctx.shape = exchange, start, x.shape
        return exchange.end()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.exchange.begin(ctx.start(gradient))
        return make_placeholder(gradient, *ctx.shape), None, None


begin_exchange = _Begin.apply
"""Start to exchange x. Return a placeholder of `shape` for the result; x's gradient is awaited in the backward pass."""
end_exchange = _End.apply
"""Wait for the exchange behind the placeholder x and return its result. `start` starts the gradient's exchange."""


def exchange_rows(tensors: Sequence[torch.Tensor], sent: Sequence[int], received: Sequence[int], group: Any) -> list[torch.Tensor]:
    """Send rows of each tensor [n, ...] to the ranks of `group` and return the received rows, with gradient. `sent` and `received` are row
    counts per rank. The other micro-batch has its turn meanwhile."""
    there, back = (_start_all_to_all(*sizes, group) for sizes in ((sent, received), (received, sent)))
    return exchange(tensors, [(sum(received), *x.shape[1:]) for x in tensors], there, back)


def exchange(tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], there: Start, back: Start) -> list[torch.Tensor]:
    """Exchange tensors, with gradient; `shapes` are those of the results. The other micro-batch has its turn meanwhile.

    Args:
        there: starts the exchange of a tensor.
        back: starts that of its gradient.
    """
    exchanges = [Exchange() for _ in tensors]
    begun = [(begin_exchange(x, each, there, shape), each) for x, shape, each in zip(tensors, shapes, exchanges, strict=True)]
    two_batch.give_turn()
    return [end_exchange(x, each, back) for x, each in begun]


def _start_all_to_all(sent: Sequence[int], received: Sequence[int], group: Any) -> Start:
    def start(x: torch.Tensor) -> Pending:
        result = x.new_empty(sum(received), *x.shape[1:])
        return pend(dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=group, async_op=True), result)

    return start


def start_scatter(whole: torch.Tensor, group: Any) -> Pending:
    """Start to reduce-scatter [T, ...] into [T / tp, ...] in the library's order and the dtype of `whole`."""
    whole = whole.contiguous()
    own = whole.new_empty(len(whole) // group.size(), *whole.shape[1:])
    return pend(dist.reduce_scatter_tensor(own, whole, group=group, async_op=True), own)


def pend(work: Any, result: torch.Tensor) -> Pending:
    """Return a function that waits for `work` and returns `result`."""

    def finish() -> torch.Tensor:
        work.wait()
        return result

    return finish
