"""Gates: rounded once, the same bits for any number of rows, gradients of float64, and the kernels in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from support.kernel_tests import in_interpreter, random

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.gates import reference
from megatron_rl.kernels.gates.reference import gate, gate_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_have_the_bits_of_any_batch_and_are_rounded_once(dtype):
    x, z, weight = random(37, 3, 24, seed=0, dtype=dtype), random(37, 3, 24, seed=1, dtype=dtype), random(24, seed=2, dtype=dtype)
    cases = {
        "norm": (lambda x, z: gate_norm(x, z, weight, 1e-6), z, _gate_norm_exactly(x, z, weight)),
        "gate": (gate, z, x.double() * z.double().sigmoid()),
        "shared": (gate, z[..., :1], x.double() * z[..., :1].double().sigmoid()),
    }
    for function, gates, exact in cases.values():
        whole = function(x, gates)
        assert whole.dtype == dtype
        assert ((whole.double() - exact).abs() <= (2**-8 if dtype is torch.bfloat16 else 2**-21) * exact.abs() * 1.001 + 1e-30).all()
        for rows in (slice(1), slice(5, 8), slice(30, 37)):
            assert torch.equal(function(x[rows], gates[rows]), whole[rows])
        assert torch.equal(function(x[:, :1], gates[:, :1]), whole[:, :1]), "half of the heads"


def _gate_norm_exactly(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, z, weight = x.double(), z.double(), weight.double()
    return F.rms_norm(x, weight.shape, weight, 1e-6) * z * z.sigmoid()


def test_gradients_of_gates_and_zero_centered_norms_are_those_of_float64():
    x, z, weight = random(9, 3, 24, seed=0), random(9, 3, 24, seed=1), random(24, seed=2)
    pairs = [
        (lambda x, z, w: gate_norm(x, z, w, 1e-6), _gate_norm_exactly),
        (lambda x, z, w: gate(x, z) * w, lambda x, z, w: x * z.sigmoid() * w),
        (lambda x, z, w: gate(x, z[..., :1]) + 0 * w, lambda x, z, w: x * z[..., :1].sigmoid() + 0 * w),
        (lambda x, z, w: batch_invariant.rms_norm(x, 1 + w, 1e-6) + 0 * z, lambda x, z, w: F.rms_norm(x, w.shape, 1 + w, 1e-6) + 0 * z),
    ]
    dy = random(9, 3, 24, seed=3)
    for found, wanted in pairs:
        gradients = []
        for function, dtype in ((found, torch.float32), (wanted, torch.float64)):
            leaves = [each.to(dtype).requires_grad_() for each in (x, z, weight)]
            gradients.append(torch.autograd.grad(function(*leaves), leaves, dy.to(dtype)))
        for a, b in zip(*gradients, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.kernels
@in_interpreter
def test_gates_and_their_gradients_are_the_references_and_do_not_depend_on_the_number_of_rows():
    from megatron_rl.kernels.gates import triton as kernels

    for dtype in (torch.float32, torch.bfloat16):
        x, z, dy = (random(11, 3, 24, seed=seed, dtype=dtype) for seed in range(3))
        weight = random(24, seed=3, dtype=dtype)
        near = {"rtol": 2**-6, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        for name, inputs in (("gate_norm", (x, z, weight)), ("gate", (x, z)), ("gate", (x, z[..., :1]))):
            others, results = (1e-6,) * (name == "gate_norm"), []
            for module in (kernels, reference):
                leaves = [each.clone().requires_grad_() for each in inputs]
                out = getattr(module, name)(*leaves, *others)
                results.append([out, *torch.autograd.grad(out, leaves, dy)])
            for found, wanted in zip(*results, strict=True):
                assert found.dtype == wanted.dtype and torch.allclose(found.float(), wanted.float(), **near)
            few = getattr(kernels, name)(*(each[5:7] for each in inputs[:2]), *inputs[2:], *others)
            assert torch.equal(few, results[0][0][5:7])
            assert getattr(kernels, name)(*(each[:0] for each in inputs[:2]), *inputs[2:], *others).shape == (0, 3, 24)
        columns, results = random(11, 160, seed=4, dtype=dtype)[:, 16:88].unflatten(1, (3, 24)), []  # of a projection: they are not copied
        assert kernels.align_rows(columns) is columns
        for gates in (columns, columns.contiguous()):
            leaves = [each.detach().requires_grad_() for each in (x, gates, weight)]
            out = kernels.gate_norm(*leaves, 1e-6)
            results.append([out, *torch.autograd.grad(out, leaves, dy)])
        assert all(map(torch.equal, *results))
