"""Products of both sides: a row alone has the bits that it has among others, by DeepGEMM in FP8, and in BF16 in its deterministic mode.
Both sides' BF16 product is `kernels.plain`."""

import pytest
import torch
from support.kernel_tests import random

from megatron_rl.kernels import plain
from megatron_rl.kernels.linear import make_backend
from megatron_rl.precision.fp8 import quantize_weight
from parallel.formats import FP8

SHAPES = {"cuda": ((4096, 6144), (12288, 4096), (2048, 151936)), "cpu": ((256, 128),)}  # K, N
TOKENS, COUNTS = {"cuda": 4096, "cpu": 96}, (1, 15, 65)


def test_fp8(device, backends, subtests):
    if "deep_gemm" not in backends:
        pytest.fail("DeepGEMM is missing, see the summary")
    backend = make_backend("deep_gemm", FP8.with_scales("pow2"))
    for k, n in SHAPES[device][:2]:
        with subtests.test(K=k, N=n):
            x, master = random(TOKENS[device], k, seed=0, dtype=torch.bfloat16).to(device), random(n, k, seed=1).to(device)
            weight = backend.prepare(quantize_weight(master, "pow2"), None)
            whole = multiply_fp8(backend, x, weight)
            for count in COUNTS:
                assert torch.equal(multiply_fp8(backend, x[:count], weight), whole[:count]), count
                assert torch.equal(multiply_fp8(backend, x[-count:], weight), whole[-count:]), count


def multiply_fp8(backend, x, weight):
    return backend.fprop(backend.quantize(x.contiguous(), rows=True, columns=False), weight)


@pytest.mark.gpu
def test_bf16_in_the_deterministic_mode(subtests, record_property):
    import deep_gemm

    assert hasattr(deep_gemm, "use_deterministic_algorithms"), (
        "this DeepGEMM multiplies BF16 by cuBLASLt, in an order that follows the rows"
    )
    plain.share_products()
    for k, n in (*SHAPES["cuda"], (4096, 152064 // 8 + 5)):  # a part of a vocabulary, padded for TMA
        with subtests.test(K=k, N=n):
            x, weight = (random(rows, k, seed=rows, dtype=torch.bfloat16).cuda() for rows in (TOKENS["cuda"], n))
            whole = plain.multiply(x, weight)
            for count in (*COUNTS, 512):
                assert torch.equal(plain.multiply(x[:count], weight), whole[:count]), count
                assert torch.equal(plain.multiply(x[-count:], weight), whole[-count:]), count
            assert torch.equal(plain.multiply(x[:64], weight[: n // 16 * 8]), whole[:64, : n // 16 * 8]), "a rank's rows of the weight"
            record_property(f"K={k} N={n}: values of cuBLAS that differ", int((x[:512] @ weight.t() != whole[:512]).sum()))
