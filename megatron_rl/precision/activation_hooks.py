"""Records inputs and outputs of a running model's operators with PyTorch hooks on modules that are found by name.

Trainer and engine name operators as the precision graph does, so their recordings can be compared.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

TRAINER, ENGINE = 0, 1
HookPoint = tuple[str, int | None, str]
"""(operator whose result is recorded, index of the positional argument that holds it or None for the module's output, module). In both
names `*` stands for the number of a layer. Of an output tuple, the first element is recorded."""
_LAYERS = "decoder.layers.*.", "model.layers.*."
_LAYER_POINTS = (  # (operator, argument, Megatron's module, SGLang's module)
    ("input_norm", 0, "self_attention.linear_qkv", "self_attn.qkv_proj"),
    ("attention.qkv", None, "self_attention.linear_qkv", "self_attn.qkv_proj"),
    ("attention.q_norm", None, "self_attention.q_layernorm", "self_attn.q_norm"),
    ("attention.k_norm", None, "self_attention.k_layernorm", "self_attn.k_norm"),
    ("attention.q_a", 0, "self_attention.q_layernorm", "self_attn.q_a_layernorm"),
    ("attention.q_a_norm", None, "self_attention.q_layernorm", "self_attn.q_a_layernorm"),
    ("attention.q_b", None, "self_attention.linear_q_up_proj", "self_attn.q_b_proj"),
    ("attention.kv_a", 0, "self_attention.kv_layernorm", "self_attn.kv_a_layernorm"),
    ("attention.kv_a_norm", None, "self_attention.kv_layernorm", "self_attn.kv_a_layernorm"),
    ("attention.rope.q", 0, "self_attention.core_attention", "self_attn.attn"),
    ("attention.rope.k", 1, "self_attention.core_attention", "self_attn.attn"),
    ("attention.rope.q", 0, "self_attention.core_attention", "self_attn.attn_mqa"),
    ("attention.rope.k", 1, "self_attention.core_attention", "self_attn.attn_mqa"),
    ("attention.core", 0, "self_attention.linear_proj", "self_attn.o_proj"),
    ("attention.output", None, "self_attention.linear_proj", "self_attn.o_proj"),
    ("input_norm", 0, "self_attention.linear_qkv", "qkv_proj"),  # in hybrid families, SGLang's layer owns the parts of full attention
    ("attention.qkv", None, "self_attention.linear_qkv", "qkv_proj"),
    ("attention.q_norm", None, "self_attention.q_layernorm", "q_norm"),
    ("attention.k_norm", None, "self_attention.k_layernorm", "k_norm"),
    ("attention.rope.q", 0, "self_attention.core_attention", "attn"),
    ("attention.rope.k", 1, "self_attention.core_attention", "attn"),
    ("attention.core", 0, "self_attention.linear_proj", "o_proj"),
    ("attention.output", None, "self_attention.linear_proj", "o_proj"),
    ("input_norm", 0, "self_attention.in_proj_qkvz", "linear_attn.in_proj_qkvz"),
    ("attention.gate_norm", 0, "self_attention.out_proj", "linear_attn.out_proj"),
    ("attention.output", None, "self_attention.out_proj", "linear_attn.out_proj"),
    ("post_attention_norm", 0, "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("post_attention_norm", 0, "mlp.router", "mlp.gate"),
    ("mlp.gate_up", None, "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("mlp.swiglu", 0, "mlp.linear_fc2", "mlp.down_proj"),
    ("mlp.down", None, "mlp.linear_fc2", "mlp.down_proj"),
    ("mlp", None, "mlp", "mlp"),
)


def layer_hook_points(side: int) -> list[HookPoint]:
    """Return the points of every layer on one side, TRAINER or ENGINE."""
    return [(f"layers.*.{op}", argument, _LAYERS[side] + modules[side]) for op, argument, *modules in _LAYER_POINTS]


def attach_hooks(model: torch.nn.Module, points: Iterable[HookPoint], record: Callable[[str, torch.Tensor], None]) -> list[RemovableHandle]:
    """Call `record(operator, tensor)` at every point whose module the model has, whenever that module runs, until `remove()` is called on
    the returned handles."""
    handles = []
    for op, argument, path in points:
        pattern = re.compile(re.escape(path).replace(r"\*", r"(\d+)"))
        for name, module in model.named_modules():
            if match := pattern.fullmatch(name):
                hook = _make_hook(op.replace("*", match.group(1)) if match.groups() else op, argument, record)
                handles.append(module.register_forward_hook(hook))
    return handles


def _make_hook(op: str, argument: int | None, record: Callable[[str, torch.Tensor], None]) -> Callable[..., None]:
    def hook(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = inputs[argument] if argument is not None else output[0] if isinstance(output, tuple) else output
        record(op, tensor.detach())

    return hook
