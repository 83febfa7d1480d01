"""The gated delta net's Triton kernels in Triton's interpreter: values, gradients, and equal bits for any division of a row."""

from unittest.mock import patch

import compile_kernels
import pytest
import torch
from support.delta_rule import advance_in_cuts, choose_heads, draw_layer
from support.kernel_tests import call_with_triton, in_interpreter, needs_triton, random

from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights, reference

HEADS = DeltaHeads(2, 4, 8, 24)


@pytest.mark.kernels
@in_interpreter
def test_the_kernels_outputs_and_gradients_are_the_references():
    """A span of 4 tokens, so that sequences have several spans. No other test has these lengths, whose places are cached for one span."""
    import triton.language as tl

    from megatron_rl.kernels.gated_delta import triton as kernels
    from megatron_rl.kernels.gated_delta import triton_convolution as convolution
    from megatron_rl.kernels.gated_delta import triton_spans

    for dtype, heads, lengths, taps, gated in (
        (torch.float32, DeltaHeads(1, 2, 6, 24), [3, 9, 0, 1], 4, False),
        (torch.bfloat16, DeltaHeads(2, 2, 8, 8), [2, 5], 3, True),
        (torch.float32, DeltaHeads(1, 2, 8, 16), [1, 6], 2, True),
    ):
        weights, row = draw_layer(heads, sum(lengths), dtype, taps)
        dy, results = random(sum(lengths), heads.v, heads.v_dim, seed=9, dtype=dtype), []
        if gated:
            row = torch.cat([row[0], random(*dy.flatten(1).shape, seed=8, dtype=dtype)], 1), *row[1:]
        if not gated:
            row = row[0], 30 * row[1], row[2]  # decays of nearly 0 and 1
        norm = random(heads.v_dim, seed=7, dtype=dtype)
        for module in (kernels, reference):
            leaves = [x.clone().requires_grad_() for x in (*weights[:3], *row, *([norm] if gated else []))]
            small = patch.multiple(triton_spans, SPAN=4, _CARRY_COLUMNS=8, _TILE=4, _BLOCK=2, PRODUCTS=tl.constexpr("ieee"))
            with small, patch.object(kernels, "SPAN", 4), patch.multiple(convolution, SPAN=4, _COLUMNS=32, _TOKENS=4):
                layer = DeltaWeights(*leaves[:3], heads)
                if gated:
                    out = module.attend_gated(layer, (leaves[6], 1e-6), *leaves[3:6], lengths)
                else:
                    out = module.attend(layer, *leaves[3:], lengths)
                results.append([out.detach(), *torch.autograd.grad(out, leaves, dy)])
        near = 1e-6 if dtype is torch.float32 else 2**-5  # the interpreter truncates to BF16, and the rule's output before its norm
        for found, wanted in zip(*results, strict=True):
            assert found.dtype == wanted.dtype and found.shape == wanted.shape
            assert (found.double() - wanted.double()).norm() <= near * wanted.double().norm()


@pytest.mark.kernels
@in_interpreter
def test_prompts_chunks_decoded_tokens_and_shares_of_heads_have_the_bits_of_training():
    from megatron_rl.kernels.gated_delta import triton as kernels

    for dtype, cuts in ((torch.float32, [[1] * 4, [2, 0, 1, 1]]), (torch.bfloat16, [[2, 3], [1, 1, 1]])):
        lengths = [sum(chunks) for chunks in cuts]
        weights, row = draw_layer(HEADS, sum(lengths), dtype)
        whole = kernels.attend(weights, *row, lengths)
        found, windows, states = advance_in_cuts(kernels.advance, weights, row, cuts)
        assert torch.equal(found, whole)
        wanted, wanted_windows, wanted_states = advance_in_cuts(reference.advance, weights, row, cuts)
        near = 1e-5 if dtype is torch.float32 else 5e-2
        assert torch.equal(windows, wanted_windows) and torch.allclose(states, wanted_states, atol=near)
        assert torch.allclose(found.float(), wanted.float(), atol=near)
        assert torch.equal(torch.cat([kernels.attend(*choose_heads(weights, row, rank, 2), lengths) for rank in (0, 1)], 1), whole)


@pytest.mark.kernels
@needs_triton
def test_training_prompts_and_decoded_tokens_run_one_specialization():
    """Another one, such as for a single token, could add in another order."""
    assert call_with_triton(count_specializations) == {
        **{name: (1, 3) for name in ("convolve_token", "prepare_token", "advance_state")},
        "move_window": (1, 2),
    }


def count_specializations():
    """Return (number of different kernels, launches) by name, compiled for Hopper."""
    from triton.runtime.jit import JITFunction

    with patch.object(JITFunction, "__getitem__", JITFunction.__getitem__):
        compiled = compile_kernels.intercept_launches(90)
        from megatron_rl.kernels.gated_delta import triton as kernels

        heads = DeltaHeads(1, 2, 16, 16)
        weights, row = draw_layer(heads, 70, torch.bfloat16)
        kernels.attend(weights, *row, [54, 16])
        for tokens in (16, 1):
            a_b = [x[1 : 1 + tokens] for x in row[1:]]  # views at addresses that are no multiples of 16
            windows, states = row[0].new_zeros(tokens, row[0].shape[1], 3), torch.zeros(tokens, heads.v, heads.k_dim, heads.v_dim)
            kernels.advance(weights, row[0][:tokens], *a_b, [1] * tokens, torch.arange(tokens).int(), windows, states)
    return {name: (len({kernel.hash for kernel in kernels}), len(kernels)) for name, kernels in compiled.items()}
