"""gpt-oss on a CPU: SGLang's attention in PyTorch, which knows no sinks, gets them, and computes what the trainer computes."""

from collections.abc import Callable
from typing import Any

import torch


def allow_torch_attention(original: Callable[..., Any], server_args: Any) -> Any:
    """Wrap `handle_model_specific_adjustments`, which accepts no attention in PyTorch for gpt-oss. The hooks below add what it lacks."""
    from sglang.srt.arg_groups import model_hook

    known = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple("triton" if each == "torch_native" else each for each in known(view))
    try:
        return original(server_args)
    finally:
        model_hook.attention_backends_of = known


def keep_dtypes(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `GptOssDecoderLayer.__init__`: sinks and biases of experts have the model's dtype, as in the trainer. SGLang's sinks are BF16 in
    an FP32 model too, its biases FP32 in a BF16 model."""
    original(self, *args, **named)
    for parameter in (self.self_attn.sinks, self.mlp.experts.w13_weight_bias, self.mlp.experts.w2_weight_bias):
        parameter.data = parameter.data.to(torch.get_default_dtype())


def take_sinks(original: Callable[..., Any], self: Any, *args: Any, sinks: torch.Tensor | None = None, **named: Any) -> Any:
    """Wrap `TorchNativeAttnBackend.forward_extend` and `forward_decode`: hand `sinks` `[heads]` to `cpu_kernels.run_extend_attention` and
    `run_decode_attention`."""
    self.sinks = sinks
    try:
        return original(self, *args, **named)
    finally:
        self.sinks = None
