"""What the GPU back ends hand to their libraries, checked by stand-ins for these, and that the products are the reference's."""

import pytest
import torch
from support.fp8_reference import both_scale_formats, uneven_matrix

from megatron_rl.errors import RunError
from megatron_rl.kernels.experts import deep_gemm
from megatron_rl.kernels.experts.deep_gemm import DeepGemmExperts
from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.quantize.token_groups import TokenGroups
from megatron_rl.precision.fp8 import quantize_weight
from parallel.formats import FP8

pytestmark = pytest.mark.usefixtures("fake_libraries")

N, K = 256, 384
BACKENDS = pytest.mark.parametrize("name", ["emulated", "deep_gemm", "transformer_engine"])
BF16_ROUNDING = 2**-7
"""Relative tolerance: both sides round an FP32 sum to bf16, and sums of different order may round to neighbors, 2^-7 apart at most."""


def products(name: str, scale_format: str, x: torch.Tensor, dy: torch.Tensor, into: torch.Tensor | None = None):
    backend = make_backend(name, FP8.with_scales(scale_format))
    weight = backend.prepare(quantize_weight(uneven_matrix(dy.shape[1], K, 3), scale_format), None)
    forward = backend.quantize(x, rows=True, columns=True)
    gradient = backend.quantize(dy, rows=True, columns=True)
    return backend.fprop(forward, weight), backend.dgrad(gradient, weight), backend.wgrad(gradient, forward, into)


def activations(tokens: int, rows: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    return uneven_matrix(tokens, K, 1).bfloat16(), uneven_matrix(tokens, rows, 2).bfloat16()


def assert_close(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> None:
    """Compare FP32 sums of different order: relative to each element or, if terms cancel, to the norm."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.allclose(got.float(), expected.float(), rtol=rtol, atol=1e-6 * float(expected.float().norm()))


@both_scale_formats
@BACKENDS
@pytest.mark.parametrize("tokens, rows", [(128, N), (150, N), (3, N), (150, 576), (3, 80), (0, 576)])
def test_products_are_the_references(name, scale_format, tokens, rows):
    """The last rows may be a partial block, such as the 512 + 64 of latent attention."""
    x, dy = activations(tokens, rows)
    y, dx, dw = products(name, scale_format, x, dy)
    expected = products("emulated", scale_format, x, dy)
    assert y.dtype == dx.dtype == torch.bfloat16 and dw.dtype == torch.float32 and y.is_contiguous()
    for got, wanted, rtol in zip((y, dx, dw), expected, (BF16_ROUNDING, BF16_ROUNDING, 1e-5), strict=True):
        assert_close(got, wanted, rtol)


@pytest.mark.parametrize("name", ["deep_gemm", "transformer_engine", "experts"])
def test_a_model_that_only_scores_holds_no_transposed_weights(name):
    """Beside the blocks themselves; grouped products need them stacked."""
    format, blocks = FP8.with_scales("pow2"), [quantize_weight(uneven_matrix(N, K, seed), "pow2") for seed in (3, 4)]
    (x, dy), groups = activations(150), TokenGroups.from_counts([100, 50], "cpu")
    if name == "experts":
        backend = DeepGemmExperts(format)
        weight, given = backend.prepare(blocks), (groups,)
    else:
        backend = make_backend(name, format)
        weight, given = backend.prepare(blocks[0], None), ()
    backend.fprop(backend.quantize(x, *given, rows=True, columns=False), weight, *given)
    assert count_held_bytes(weight) == (2 if name == "experts" else 1) * N * K
    backend.dgrad(backend.quantize(dy, *given, rows=True, columns=False), weight, *given)
    assert count_held_bytes(weight) == (4 if name == "experts" else 2) * N * K


def count_held_bytes(weight):
    """Return the bytes of all E4M3 data that a prepared weight holds, once per memory."""
    held, waiting = {}, [vars(weight)]
    for each in waiting:
        if isinstance(each, torch.Tensor):
            held[each.data_ptr()] = each.numel() * (each.itemsize == 1)
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, tuple):
            waiting += each
        elif hasattr(each, "get_metadata"):
            waiting.append(each.get_metadata())
    return sum(held.values())


@both_scale_formats
@pytest.mark.parametrize("name", ["deep_gemm", "transformer_engine"])
@pytest.mark.parametrize("tokens", [150, 3, 0])
def test_sums_by_the_tree_are_of_the_references_operands(name, scale_format, tokens):
    sums = []
    for each in (name, "emulated"):
        backend = make_backend(each, FP8.with_scales(scale_format))
        weight = backend.prepare(quantize_weight(uneven_matrix(N, K, 3), scale_format), None)
        sums.append(backend.fprop_by_tree(backend.quantize(activations(tokens)[0], rows=True, columns=False), weight))
    assert sums[0].dtype == torch.float32 and sums[0].shape == (tokens, N)
    assert_close(*sums, rtol=1e-5)


@BACKENDS
@pytest.mark.parametrize(
    "make", [torch.ones, lambda *shape: torch.ones(N * K + 1)[1:].view(shape), lambda *shape: torch.ones(shape).bfloat16()]
)
def test_weight_gradients_are_added_to_a_buffer(name, make):
    """This includes buffers that a kernel cannot write to: unaligned ones, and ones in bf16."""
    x, dy = activations(130)
    buffer = make(N, K)
    returned = products(name, "pow2", x, dy, buffer)[2]
    assert returned is buffer
    expected = (1 + products("emulated", "pow2", x, dy)[2]).to(buffer.dtype)
    assert_close(buffer, expected, 1e-5 if buffer.dtype == torch.float32 else BF16_ROUNDING)
    x, dy = activations(0)  # no tokens give no rows and no gradient
    y, dx, dw = products(name, "pow2", x, dy)
    assert y.shape == (0, N) and dx.shape == (0, K) and dw.shape == (N, K) and not dw.any()
    buffer = make(N, K)
    assert products(name, "pow2", x, dy, buffer)[2] is buffer and (buffer == 1).all()


@pytest.mark.parametrize("name", ["deep_gemm", "transformer_engine"])
def test_operands_that_a_kernel_cannot_handle_are_refused(name):
    backend = make_backend(name, FP8.with_scales("pow2"))
    with pytest.raises(RunError, match=r"was asked for torch.float32"):
        backend.quantize(torch.zeros(128, 128), rows=True, columns=False)
    blocks = quantize_weight(torch.zeros(128, 128), "pow2")
    for shape, order in (((128, 192), None), ((200, 128), None), ((128, 128), torch.arange(128))):
        with pytest.raises(RunError, match="cut or reordered"):
            backend.prepare(blocks if order is not None else quantize_weight(torch.zeros(shape), "pow2"), order)


@both_scale_formats
def test_a_grouped_product_matches_the_products_of_single_experts(scale_format):
    counts = [130, 0, 3, 256]
    groups = TokenGroups.from_counts(counts, "cpu")
    places = groups.places
    assert groups.lengths == [256, 0, 128, 256] and len(places) == sum(counts)
    assert groups.tiles[0].tolist() == [0, 0, 256, 384, 384] and groups.tiles[1].tolist() == [256, 256, 128, 256, 256]
    blocks = [quantize_weight(uneven_matrix(N, K, seed), scale_format) for seed in range(4)]
    experts, single = DeepGemmExperts(FP8.with_scales(scale_format)), make_backend("deep_gemm", FP8.with_scales(scale_format))
    x, dy = activations(sum(counts))
    forward, gradient = (experts.quantize(values, groups, rows=True, columns=True) for values in (x, dy))
    weight = experts.prepare(blocks)
    y, dx = experts.fprop(forward, weight, groups), experts.dgrad(gradient, weight, groups)
    dw = torch.ones(len(counts), N, K)
    experts.wgrad(gradient, forward, groups, dw.unbind())
    apart = [torch.ones(N, K) for _ in counts]
    experts.wgrad(gradient, forward, groups, apart)
    assert torch.equal(torch.stack(apart), dw)
    dw -= 1
    for expert, (xs, dys) in enumerate(zip(x.split(counts), dy.split(counts), strict=True)):
        rows = places[sum(counts[:expert]) :][: counts[expert]]
        weight = single.prepare(blocks[expert], None)
        operand, slope = (single.quantize(values, rows=True, columns=True) for values in (xs, dys))
        assert_close(y[rows], single.fprop(operand, weight), BF16_ROUNDING)
        assert_close(dx[rows], single.dgrad(slope, weight), BF16_ROUNDING)
        assert_close(dw[expert], single.wgrad(slope, operand, None), 1e-5)
    others = torch.ones(groups.rows, dtype=torch.bool).index_fill_(0, places, False)
    assert not y[others].any() and not dx[others].any()


@pytest.mark.parametrize("counts", [[130, 0, 3, 700, 1], [0, 0, 5, 0, 0], [0] * 5])
def test_on_blackwell_tokens_are_not_transposed_for_the_same_gradients_of_weights(monkeypatch, counts):
    """Six groups of 128 tokens take two words of scales; a call takes two experts here, and 128 there."""
    groups, (x, dy) = TokenGroups.from_counts(counts, "cpu"), activations(sum(counts))
    gradients, data = [], []
    for blackwell in (False, True):
        monkeypatch.setattr(deep_gemm, "is_blackwell", lambda blackwell=blackwell: blackwell)
        monkeypatch.setattr(deep_gemm, "_MAX_GROUPS", 2)
        experts = DeepGemmExperts(FP8.with_scales("pow2"))
        forward, gradient = (experts.quantize(values, groups, rows=True, columns=True) for values in (x, dy))
        dw = torch.ones(len(counts), N, K)
        experts.wgrad(gradient, forward, groups, dw.unbind())
        gradients.append(dw)
        data.append(forward.columns)
    (transposed, scales), (as_they_are, same_scales) = data
    assert torch.equal(scales, same_scales) and as_they_are.shape == (groups.rows, K)
    parts = [part.t().flatten() for part in as_they_are.view(torch.uint8).split(groups.lengths)]
    assert torch.equal(torch.cat(parts), transposed.view(torch.uint8))
    assert torch.equal(*gradients) and (gradients[1] != 1).any() == (sum(counts) > 0)
