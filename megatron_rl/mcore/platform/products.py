"""Megatron's products of unquantized linear layers as `batch_invariant.invariant_matmul`: on a CPU, and on a GPU whose kernels trainer and
engine share."""

import functools
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron_rl.kernels import plain
from megatron_rl.kernels.batch_invariant import InvariantMatmuls
from megatron_rl.mcore.base.weight_gradient import add_product


def add_gradients_in_place() -> None:
    """Give Megatron's linear layers PyTorch's product instead of apex's, which may be absent, to add FP32 gradients to their buffers."""
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)


def patch_linear_products() -> None:
    """Patch the forward products of this process, whose bits would depend on the number of rows. Biases are added to rounded products."""
    import megatron.core.tensor_parallel.layers as layers

    def multiply(forward: Any, *args: Any) -> Any:
        with InvariantMatmuls():
            return forward(*args)

    for function in (layers.LinearWithFrozenWeight, layers.LinearWithGradAccumulationAndAsyncCommunication):
        function.forward = staticmethod(partial(multiply, function.forward))


@functools.cache
def share_products() -> None:
    """Multiply BF16 in this process on a GPU as the engine does; see `kernels.plain`."""
    plain.share_products()
    patch_linear_products()
