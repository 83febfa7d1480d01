"""The layers of all experts of a rank as one, whose three products run in one kernel each (`precision.backends.GROUPED`)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.mcore import two_batch
from megatron_rl.mcore.layers.quantized_linear import QuantizedLinear
from megatron_rl.mcore.layers.weight_gradient import hand_over_gradient
from megatron_rl.precision.backends import make_grouped_backend
from megatron_rl.precision.backends.base import Operand
from megatron_rl.precision.backends.token_groups import TokenGroups


class GroupedLinear:
    """One linear layer of every expert. The blocks stay the layers' own; their bytes are laid end to end once per optimizer step."""

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        self.layers = layers
        first = layers[0]
        backend = make_grouped_backend(first.config.linear_backend, first.format)
        assert backend is not None
        self.backend = backend
        self._operand: Any = None
        self._scales: list[weakref.ref[torch.Tensor]] = []
        """Of the blocks that `_operand` was made of: new blocks have new ones, and the operand goes with the old."""

    def __call__(self, x: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """[T, K] -> [T, N], rows as `groups` says."""
        self._wait_for_weights()
        weights = [layer.weight if torch.is_grad_enabled() else layer.weight.detach() for layer in self.layers]  # then WGrad needs nothing
        return _GroupedMatmul.apply(x, groups, self, *weights)

    def multiply_packed(self, packed: torch.Tensor, groups: TokenGroups) -> torch.Tensor:
        """The same, without gradient, of tokens [n] that the backend has packed."""
        self._wait_for_weights()
        return self.backend.fprop(self.backend.unpack(packed, groups), self.operand, groups)

    def _wait_for_weights(self) -> None:
        """Run what Megatron's DDP has hooked to the layers, which waits for gathered weights."""
        for layer in self.layers:
            for hook in layer._forward_pre_hooks.values():  # type: ignore[attr-defined]
                hook(layer, ())

    @property
    def operand(self) -> Any:
        """All experts' blocks in the form of the backend."""
        scales = [layer.scale for layer in self.layers]
        if self._operand is None or any(new is not old() for new, old in zip(scales, self._scales, strict=True)):
            self._forget()  # before there are two
            self._scales = [weakref.ref(scale, self._forget) for scale in scales]
            self._operand = self.backend.prepare([layer.blocks for layer in self.layers])
        return self._operand

    def _forget(self, _: Any = None) -> None:
        """Free the operand, as soon as one of the blocks is replaced: while the engine serves, nothing is to be held for it."""
        self._operand = None


def can_group(layers: Sequence[Any]) -> bool:
    """Return whether these layers, of one shape, may run as one: quantized by a backend that has grouped products, nothing in the place of
    their forward passes (`mcore.engine_emulation`), and nobody who looks at each one's output."""
    return all(
        isinstance(layer, QuantizedLinear)
        and make_grouped_backend(layer.config.linear_backend, layer.format) is not None
        and layer.quantization_enabled
        and "_forward_impl" not in vars(layer)
        and not layer._forward_hooks  # type: ignore[attr-defined]
        for layer in layers
    )


class _GroupedMatmul(torch.autograd.Function):
    """`quantized_linear.QuantizedMatmul` of all experts. Their parallelism needs no communication here: the dispatcher's is enough."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: TokenGroups, linear: GroupedLinear, *weights: torch.Tensor) -> torch.Tensor:
        operand = linear.backend.quantize(x, groups, rows=True, columns=any(ctx.needs_input_grad[3:]))
        ctx.save_for_backward(*operand.columns)
        ctx.groups, ctx.linear, ctx.turn = groups, linear, two_batch.get_turn()
        return linear.backend.fprop(operand, linear.operand, groups)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups, linear, backend = ctx.groups, ctx.linear, ctx.linear.backend
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        gradient = backend.quantize(dy, groups, rows=needs_dx, columns=needs_dw)
        dx = backend.dgrad(gradient, linear.operand, groups) if needs_dx else None
        weights = [layer.weight for layer in linear.layers]
        if not needs_dw:
            return dx, None, None, *[None for _ in weights]
        sums = backend.wgrad(gradient, Operand(gradient.tokens, columns=ctx.saved_tensors), groups)
        torch._foreach_add_([weight.main_grad for weight in weights], sums.unbind())
        return dx, None, None, *[hand_over_gradient(weight, ctx.turn) for weight in weights]
