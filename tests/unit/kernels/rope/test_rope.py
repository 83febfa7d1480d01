"""Rotary positions in one pass: Megatron's rotation with the engine's rounding, and the kernel's bits in Triton's interpreter. YaRN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import ARCHITECTURES
from support.kernel_tests import call_with_triton, compile_for_hopper, in_interpreter, needs_triton
from support.processes import call_in_fresh_process
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.kernels.rope import reference
from megatron_rl.kernels.rope.reference import Rotation, RoundedRotation
from parallel.model_geometry import ModelGeometry
from rollout_sglang.platform import stub_modules

POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 0, 6, 5])


def make_rotation(pairs: int, interleaved: bool = False, scale: float = 1.0) -> Rotation:
    angles = torch.outer(torch.arange(9.0), 1 / 10000 ** (torch.arange(pairs) / pairs))
    return Rotation.from_angles(angles, POSITIONS, interleaved, scale)


def by_megatron(x: torch.Tensor, pairs: int, interleaved: bool, scale: float) -> torch.Tensor:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd  # takes seconds, and kernels do not need it

    angles = torch.outer(torch.arange(9.0), 1 / 10000 ** (torch.arange(pairs) / pairs))[POSITIONS]
    twice = torch.stack([angles, angles], -1).flatten(-2) if interleaved else torch.cat([angles, angles], -1)
    return _apply_rotary_pos_emb_bshd(x.unsqueeze(1), twice[:, None, None], interleaved, mscale=scale).squeeze(1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs, width, scale", [(16, 32, 1.0), (8, 32, 1.0), (16, 32, 1.3)])
def test_it_is_megatrons_rotation_rounded_once(interleaved, pairs, width, scale):
    x = torch.randn(9, 3, width, generator=torch.Generator().manual_seed(0))
    rotation = make_rotation(pairs, interleaved, scale)
    assert torch.allclose(rotation.rotate(x), by_megatron(x, pairs, interleaved, scale), atol=1e-6)
    low = x.bfloat16()
    exact = by_megatron(low.float(), pairs, interleaved, scale)
    once, thrice = rotation.rotate(low), by_megatron(low, pairs, interleaved, scale)
    assert ((once.float() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all(), "half a unit in the last place"
    assert ((thrice.float() - exact).abs() > exact.abs() * 2**-7 + 1e-6).any(), "Megatron rounds more often, as engines on a CPU do"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs, scale", [(16, 1.0), (8, 1.3)])
def test_the_rotation_of_a_cpu_has_megatrons_bits_and_those_of_its_gradient(pairs, scale, dtype, interleaved):
    angles = torch.outer(torch.arange(9.0), 1 / 10000 ** (torch.arange(pairs) / pairs))
    rotation = RoundedRotation.from_angles(angles, POSITIONS, interleaved, scale, dtype)
    x, gradient = (torch.randn(9, 3, 32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    (own, of_own), (wanted, of_wanted) = (
        (y := rotate(leaf := x.clone().requires_grad_()), torch.autograd.grad(y, leaf, gradient)[0])
        for rotate in (rotation.rotate, lambda x: by_megatron(x, pairs, interleaved, scale))
    )
    assert torch.equal(own, wanted) and torch.equal(of_own, of_wanted)


def test_other_numbers_of_a_head_stay_and_the_gradient_turns_back():
    rotation, x = make_rotation(4), torch.randn(9, 2, 24, requires_grad=True)
    y = rotation.rotate(x)
    assert torch.equal(y[..., 8:], x[..., 8:]) and torch.allclose(y[..., :8], rotation.rotate(x[..., :8]))
    gradient = torch.randn_like(y)
    y.backward(gradient)
    assert torch.allclose(y.norm(), x.norm()) and torch.allclose(rotation.rotate(x.grad), gradient, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_of_a_partial_rotation_is_that_of_float64(interleaved):
    rotation, x = make_rotation(4, interleaved), torch.randn(9, 2, 24)
    dy, place = torch.randn(9, 2, 24), torch.arange(8).view(4, 2) if interleaved else torch.arange(8).view(2, 4).t()

    def rotate_plainly(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[POSITIONS].double().unsqueeze(1) for table in (rotation.cos, rotation.sin))
        a, b = x[..., place[:, 0]], x[..., place[:, 1]]
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        return torch.cat([rotated[..., place.flatten().argsort()], x[..., 8:]], -1)

    gradients = []
    for function, dtype in ((rotation.rotate, torch.float32), (rotate_plainly, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf, dy.to(dtype))[0])
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[1].norm()


@in_interpreter
def test_the_kernels_results_are_the_references():
    """Up to the last bit: the interpreter has no fused multiply-add and truncates to BF16."""
    from megatron_rl.kernels.rope.triton import rotate

    for pairs, width, interleaved in ((16, 32, False), (16, 32, True), (8, 20, False), (4, 24, True)):
        for dtype in (torch.bfloat16, torch.float32):
            mixed = torch.randn(9, 7, width, generator=torch.Generator().manual_seed(pairs)).to(dtype)
            x, rotation = mixed[:, 1:6], make_rotation(pairs, interleaved)
            for sign in (1.0, -1.0):
                kernel, wanted = rotate(x, rotation, sign), reference.rotate(x, rotation, sign)
                bound = {"rtol": 2**-7, "atol": 1e-6} if dtype is torch.bfloat16 else {"atol": 1e-6}
                assert torch.allclose(kernel.float(), wanted.float(), **bound), (pairs, dtype)
    assert rotate(x[:0], rotation._replace(positions=rotation.positions[:0]), 1.0).shape == (0, 5, 24)


def compile_kernel() -> tuple[str, str]:
    """Return (PTX, report of the assembler) for the queries of Qwen3."""
    from megatron_rl.kernels.rope.triton import LAUNCH, rotate_token

    fixed = dict(WIDTH=128, PAIRS=64, INTERLEAVED=False, HEADS_TILE=32, PAIRS_TILE=64, WIDTH_TILE=128)
    types = {"x": "*bf16", "result": "*bf16", "cos": "*fp32", "sin": "*fp32", "positions": "*i64", "sign": "fp32"}
    return compile_for_hopper(rotate_token, LAUNCH, types, fixed, ("token_stride", "head_stride"))


@pytest.mark.kernels
@needs_triton
def test_it_compiles_for_hopper():
    ptx, report = call_with_triton(compile_kernel)
    assert "fma.rn.f32" in ptx and "st.global.v4" in ptx and " 0 bytes spill stores" in report, report


_CASES = st.fixed_dictionaries(
    {"factor": st.floats(1.0, 40.0), "original_max_position_embeddings": st.integers(1, 262144)},
    optional={"beta_fast": st.floats(2.0, 64.0), "beta_slow": st.floats(0.5, 2.0), "mscale": st.floats(0.1, 2.0)},
)


def check_yarn():
    """Run in a process of its own, because SGLang is imported without a GPU's packages."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor

    from megatron_rl.mcore.layers.attention.yarn import extend_frequencies

    stub_modules.install()
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    class Engine(YaRNScalingRotaryEmbedding):
        def _compute_cos_sin_cache(self):
            return torch.zeros(1)  # the table of all positions takes long

    @settings(deadline=None, max_examples=100)
    @given(_CASES, st.sampled_from([64, 80, 128]), st.sampled_from([1.0, 0.5]), st.sampled_from([10000, 1e6, 5e6, 100.0]))
    def check(yarn, head_dim, share, theta):
        if "mscale" in yarn:
            yarn["mscale_all_dim"] = 1.1
        config = ARCHITECTURES["qwen3"] | {"rope_theta": theta, "head_dim": head_dim, "rope_scaling": {"type": "yarn", **yarn}}
        read = ModelGeometry.from_hf_config(config).rope
        width = int(head_dim * share)
        plain = 1.0 / (read.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        ours = extend_frequencies(plain, read.theta, read.yarn)
        scale = _yarn_get_concentration_factor(read.yarn.rotary_scaling_factor, read.yarn.mscale, read.yarn.mscale_all_dim)

        parameters = {"rope_type": "yarn", "rope_theta": theta, "partial_rotary_factor": share, **yarn}
        theirs, their_scale = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(head_dim=head_dim, rope_parameters=parameters))
        assert torch.equal(ours, theirs) and scale == their_scale

        length, factor = yarn.pop("original_max_position_embeddings"), yarn.pop("factor")
        engine = Engine(head_dim, width, length, theta, True, factor, torch.float32, **yarn)
        assert torch.equal(ours, engine._compute_inv_freq(factor)) and scale == engine.mscale

    check()


def test_yarns_frequencies_and_scale_are_transformers_and_the_engines_to_the_bit():
    call_in_fresh_process(check_yarn, OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1")
