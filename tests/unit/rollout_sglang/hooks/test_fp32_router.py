"""The engine's router in FP32, as the trainer's, and SGLang's operators on a CPU with the trainer's formulas."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.kernels.batch_invariant import multiply_heads
from rollout_sglang.hooks import cpu_kernels, fp32_router


def test_logits_are_products_of_fp32_values():
    x, weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in ((40, 256), (128, 256)))
    logits = fp32_router.compute_router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits.topk(8).indices, (x @ weight.t()).topk(8).indices)  # what SGLang does itself chooses other experts
    assert torch.equal(fp32_router.compute_router_logits(x[:1], weight), logits[:1]), "a token alone"


@pytest.mark.parametrize("method", ["UnquantizedLinearMethod", "Fp8LinearMethod"])
def test_the_gate_of_a_block_gets_the_method_unless_it_is_quantized(monkeypatch, method):
    class Fp32: ...

    def build(block, hidden):
        block.gate = SimpleNamespace(quant_method=type(method, (), {})(), hidden=hidden)

    monkeypatch.setattr(fp32_router, "_make_router_method", lambda: Fp32)
    block = SimpleNamespace()
    if method == "Fp8LinearMethod":
        with pytest.raises(NotImplementedError, match="a router in Fp8LinearMethod is outside the precision contract"):
            fp32_router.use_fp32_gate(build, block, 7)
    else:
        fp32_router.use_fp32_gate(build, block, 7)
        assert isinstance(block.gate.quant_method, Fp32) and block.gate.hidden == 7


def test_a_gate_that_sglang_widens_keeps_the_models_dtype_and_gives_the_same_fp32_logits():
    gate, x = SimpleNamespace(), torch.randn(40, 256).bfloat16()
    weight = torch.randn(8, 256)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")  # as SGLang does for this family
    try:
        fp32_router.use_model_dtype(lambda gate, weight: setattr(gate, "weight", torch.nn.Parameter(weight)), gate, weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert gate.weight.dtype == torch.bfloat16 and torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(fp32_router.compute_gate_logits(gate, x), fp32_router.compute_router_logits(x, weight.bfloat16().float()))


def test_a_bias_is_added_to_the_rounded_product():
    """As Megatron's layers do; one product with a bias would be rounded once."""
    x, weight, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in ((40, 256), (64, 256), (64,)))
    y = cpu_kernels.apply_plain_linear(None, SimpleNamespace(weight=weight), x, bias)
    assert torch.equal(y, x @ weight.t() + bias) and not torch.equal(y, F.linear(x, weight, bias))
    assert torch.equal(cpu_kernels.apply_plain_linear(None, SimpleNamespace(weight=weight), x[:1]), (x @ weight.t())[:1])


def test_both_products_of_the_absorbed_form_are_the_trainers():
    x, weight, other = torch.randn(5, 4, 128), torch.randn(4, 64, 128), torch.randn(64, 64)
    out = torch.empty(5, 4 * 64)

    def forward(factor: torch.Tensor, scale: float) -> torch.Tensor:  # as SGLang has them: w_kc is transposed, w_vc's result has a place
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.view(5, 4, 64).transpose(0, 1))
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1) @ factor * scale

    wanted = multiply_heads(x, weight)
    assert torch.equal(cpu_kernels.multiply_invariantly(forward, other, scale=2.0), wanted @ other * 2.0)
    assert torch.equal(out, wanted.flatten(1))
