"""SGLang's platform plug-in for a plain CPU: no sgl_kernel, no Triton, no graphs, FP8 by the project's emulated products.

Chosen by `SGLANG_PLATFORM=megatron_rl_cpu`, which `rollout_sglang.launch_args` sets on a machine without a GPU.
"""

from __future__ import annotations

NAME = "megatron_rl_cpu"


def activate() -> str:
    """Return the dotted path of the platform class: the entry point of the group `sglang.srt.platforms`."""
    return "rollout_sglang.platform.cpu.CpuPlatform"
