"""Speed of linear layers of 8B and 32B models: the three products of every back end against BF16, quantizers against a copy; of
row-parallel ones, sums by the tree against the library's."""

import pytest
import torch
from policies import ARCHITECTURES
from timing import time_in_turns, time_kernels

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import quantize_weight
from parallel.formats import FP8
from parallel.model_geometry import ModelGeometry


def list_shapes(size):
    """Return (N, K) of the linear layers of a published model, without tensor parallelism."""
    model = ModelGeometry.from_hf_config(ARCHITECTURES[size])
    kind = model.attention[0]
    qkv, heads = kind.head_dim * (kind.heads + 2 * kind.kv_heads), kind.head_dim * kind.heads
    shapes = {
        "qkv": (qkv, model.hidden),
        "o": (model.hidden, heads),
        "fc1": (2 * model.ffn, model.hidden),
        "fc2": (model.hidden, model.ffn),
    }
    return {f"{size} {name}": shape for name, shape in shapes.items()}


ALL_SHAPES = list_shapes("8B") | list_shapes("32B")
ROW_PARALLEL = {name: ALL_SHAPES[name] for name in ("8B o", "8B fc2", "32B fc2")}
SHAPES = {name: shape for name, shape in ALL_SHAPES.items() if not name.endswith(" o")}


def make_cases(backends, device, tokens, n, k):
    """Return (operation, "bf16" or back end) -> what to time. `quantize` in BF16 is a copy of x, which moves the bytes of both quantized
    forms: two read and two written. DeepGEMM compiles three kernels for each shape."""
    x, dy = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in (k, n))
    master = torch.randn(n, k, device=device) * 0.02
    bf16_weight, gradient, fp8_weight = master.bfloat16(), torch.zeros_like(master), quantize_weight(master, "pow2")
    cases = {
        ("fprop", "bf16"): lambda: x @ bf16_weight.t(),
        ("dgrad", "bf16"): lambda: dy @ bf16_weight,
        ("wgrad", "bf16"): lambda: gradient.add_(dy.t() @ x),
        ("quantize", "bf16"): lambda: x.clone(),
    }
    for name in backends:
        backend = make_backend(name, FP8.with_scales("pow2"))
        weight = backend.prepare(fp8_weight, None)
        x_fp8, dy_fp8 = (backend.quantize(values, rows=True, columns=True) for values in (x, dy))
        cases |= {
            ("fprop", name): lambda b=backend, x=x_fp8, w=weight: b.fprop(x, w),
            ("dgrad", name): lambda b=backend, dy=dy_fp8, w=weight: b.dgrad(dy, w),
            ("wgrad", name): lambda b=backend, x=x_fp8, dy=dy_fp8: b.wgrad(dy, x, gradient),
            ("quantize", name): lambda b=backend: b.quantize(x, rows=True, columns=True),
        }
    return cases


@pytest.mark.parametrize("shape", SHAPES)
def test_speed_of_products_and_quantizers(device, backends, figures, shape):
    tokens, (n, k), repeat = (8192, SHAPES[shape], 10) if device == "cuda" else (64, (256, 128), 1)
    cases = make_cases(backends, device, tokens, n, k)
    seconds = figures.measure(time_in_turns, (cases, repeat), {"warmup": 3 if device == "cuda" else 0, "timer": time_kernels})
    assert len(seconds) == 4 * (1 + len(backends))
    for operation in ("fprop", "dgrad", "wgrad", "quantize"):
        of_operation = {case: value for (part, case), value in seconds.items() if part == operation}
        for case, value in of_operation.items():  # a copy reads and writes two bytes per value; a quantizer reads two, writes one twice
            rate = {"gb_per_s": 4e-9 * tokens * k / value} if operation == "quantize" else {"tflop_per_s": 2e-12 * tokens * n * k / value}
            figures.add(f"{shape} {operation}, {case}", seconds=value, of_bf16=of_operation["bf16"] / value, **rate)


@pytest.mark.parametrize("tokens", [8192, 64])
@pytest.mark.parametrize("shape", ROW_PARALLEL)
def test_speed_of_sums_by_the_tree(device, backends, figures, shape, tokens):
    """What `precision.reduction = "tree"` costs in training and in decoding, on one rank at tp 1."""
    tokens, (n, k), repeat = (tokens, ROW_PARALLEL[shape], 10) if device == "cuda" else (8, (256, 256), 1)
    x, master = torch.randn(tokens, k, device=device, dtype=torch.bfloat16), torch.randn(n, k, device=device) * 0.02
    bf16_weight = master.bfloat16()
    cases = {("bf16", "fast"): lambda: x @ bf16_weight.t(), ("bf16", "tree"): lambda: tree.multiply(x, bf16_weight).to(x.dtype)}
    for name in backends:
        backend = make_backend(name, FP8.with_scales("pow2"))
        weight, x_fp8 = backend.prepare(quantize_weight(master, "pow2"), None), backend.quantize(x, rows=True, columns=False)
        cases |= {
            (name, "fast"): lambda b=backend, x=x_fp8, w=weight: b.fprop(x, w),
            (name, "tree"): lambda b=backend, x_fp8=x_fp8, w=weight: b.fprop_by_tree(x_fp8, w).to(x.dtype),
        }
    seconds = figures.measure(time_in_turns, (cases, repeat), {"warmup": 3 if device == "cuda" else 0, "timer": time_kernels})
    for (case, order), value in seconds.items():
        rates = {"tflop_per_s": 2e-12 * tokens * n * k / value, "of_fast": value / seconds[case, "fast"]}
        figures.add(f"{shape}, {tokens} tokens, {case}, {order}", seconds=value, **rates)
