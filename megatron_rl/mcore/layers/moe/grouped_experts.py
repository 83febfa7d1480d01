"""Runs all experts of a rank at once, with one kernel per product (`kernels.experts.backends.GROUPED`) and fused operators in between.

No padded, weighted or activated copy of the tokens is written in BF16.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.kernels.experts.backends import make_grouped_backend
from megatron_rl.kernels.experts.reference import collect
from megatron_rl.kernels.linear.base import Operand
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.mcore.base import two_batch
from megatron_rl.mcore.base.exchange import make_placeholder
from megatron_rl.mcore.base.weight_gradient import hand_over_gradient
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear


class GroupedLinear:
    """One linear layer of all experts. Its operand concatenates the layers' blocks once per optimizer step."""

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        self.layers = layers
        self.backend: Any = make_grouped_backend(layers[0].config.linear_backend, layers[0].format)
        self._operand: Any = None
        self._scales: list[weakref.ref[torch.Tensor]] = []
        """Scales of the blocks behind `_operand`. New blocks have new scales, which invalidates the operand."""

    def list_weights(self) -> list[torch.Tensor]:
        """Return the layers' weights after running DDP's hooks, which wait for gathered weights. Without gradient, WGrad needs no
        operands."""
        for layer in self.layers:
            for hook in layer._forward_pre_hooks.values():  # type: ignore[attr-defined]
                hook(layer, ())
        return [layer.weight if torch.is_grad_enabled() else layer.weight.detach() for layer in self.layers]

    def find_gradients(self, dy: Operand, columns: list[torch.Tensor], groups: TokenGroups, wanted: bool) -> list[torch.Tensor | None]:
        """If `wanted`, add the weights' gradients to their buffers; return their gradients for autograd. `columns` is WGrad's saved operand
        of x."""
        if not wanted:
            return [None] * len(self.layers)
        weights = [layer.weight for layer in self.layers]
        self.backend.wgrad(dy, Operand(dy.tokens, columns=tuple(columns)), groups, [weight.main_grad for weight in weights])  # type: ignore[attr-defined]
        return [hand_over_gradient(weight) for weight in weights]

    @property
    def operand(self) -> Any:
        """The blocks of all experts in the backend's form."""
        scales = [layer.scale for layer in self.layers]
        if self._operand is None or any(new is not old() for new, old in zip(scales, self._scales, strict=True)):
            self.free_operand()  # before the new operand is allocated
            self._scales = [weakref.ref(scale, self.free_operand) for scale in scales]
            self._operand = self.backend.prepare([layer.blocks for layer in self.layers])
        return self._operand

    def free_operand(self, _: Any = None) -> None:
        """Free the operand. Called as soon as a block is replaced, so that no memory is held while the engine generates."""
        self._operand = None


def have_grouped_products(layers: Sequence[Any]) -> bool:
    """Return whether a backend with grouped products quantizes all layers."""
    return all(
        isinstance(layer, QuantizedLinear) and make_grouped_backend(layer.config.linear_backend, layer.format) is not None
        for layer in layers
    )


def can_group(layers: Sequence[Any]) -> bool:
    """Return whether these layers of one shape can run as one."""
    return have_grouped_products(layers) and all(layer.can_fuse for layer in layers)


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, groups: TokenGroups, first: GroupedLinear, second: GroupedLinear, gives_turn: bool = False
) -> torch.Tensor:
    """Return the outputs [n, h] of tokens x [n, h] (or packed) times weights float32 [n], in the order of x; with gradient unless packed.
    The dispatcher does all communication. With `gives_turn`, the other micro-batch has its turn between the two products."""
    activation, gate_up = _FirstLayers.apply(x, groups, first, *first.list_weights())
    if gives_turn:
        two_batch.give_turn()
    return _SecondLayers.apply(activation, gate_up, weights, groups, second, *second.list_weights())


class _FirstLayers(torch.autograd.Function):
    """Returns the fields of `quantized_matmul.GateUp`. Keeps WGrad's operand, gate and up."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, groups: TokenGroups, first: GroupedLinear, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        backend, columns = first.backend, any(ctx.needs_input_grad[3:])
        operand = backend.quantize(x, groups, rows=True, columns=columns) if x.is_floating_point() else backend.unpack(x, groups)
        gate_up = backend.fprop(operand, first.operand, groups)
        ctx.groups, ctx.first = groups, first
        ctx.save_for_backward(gate_up, *operand.columns)
        ctx.mark_non_differentiable(gate_up)
        ctx.set_materialize_grads(False)
        return make_placeholder(gate_up, len(gate_up), gate_up.shape[-1] // 2), gate_up

    @staticmethod
    def backward(ctx: Any, of_activation: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        groups, first, (needs_dx, _, _, *of_weights) = ctx.groups, ctx.first, ctx.needs_input_grad
        gate_up, *columns = ctx.saved_tensors
        operand = first.backend.quantize_swiglu(gate_up, of_activation, groups, rows=needs_dx, columns=any(of_weights))
        del of_activation
        dx = collect(first.backend.dgrad(operand, first.operand, groups), groups.places) if needs_dx else None
        return dx, None, None, *first.find_gradients(operand, columns, groups, any(of_weights))


class _SecondLayers(torch.autograd.Function):
    """Computes SwiGLU while quantizing. Keeps WGrad's operand, and the outputs for the gradient of the weights."""

    @staticmethod
    def forward(
        ctx: Any, activation: Any, gate_up: torch.Tensor, weights: torch.Tensor, groups: TokenGroups, second: GroupedLinear, *_: Any
    ) -> torch.Tensor:
        operand = second.backend.quantize_swiglu(gate_up, None, groups, rows=True, columns=any(ctx.needs_input_grad[5:]))
        outputs = second.backend.fprop(operand, second.operand, groups)
        ctx.groups, ctx.second = groups, second
        ctx.save_for_backward(outputs, weights, *operand.columns)
        return collect(outputs, groups.places, weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        groups, second, needs_dw = ctx.groups, ctx.second, any(ctx.needs_input_grad[5:])
        outputs, weights, *columns = ctx.saved_tensors
        operand, of_weights = second.backend.quantize_weighed(gradient, outputs, weights, groups, columns=needs_dw)
        of_activation = second.backend.dgrad(operand, second.operand, groups)
        return of_activation, None, of_weights, None, None, *second.find_gradients(operand, columns, groups, needs_dw)
