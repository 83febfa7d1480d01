"""What Megatron-Core names and does not define without Transformer Engine, on a GPU as well."""

import torch
from megatron.core.transformer.moe import moe_utils

from megatron_rl.mcore.platform import cpu


def test_a_router_on_a_gpu_needs_no_transformer_engine(monkeypatch):
    """`deep_gemm` runs without it: every router's pass ended with a NameError."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    logits = moe_utils.router_gating_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(logits, x @ weight.t())
    logits.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, 8))
