"""SGLang's platform plug-in for a plain CPU: no sgl_kernel, Triton or graphs, and FP8 through this project's emulated products.

Chosen by `SGLANG_PLATFORM=megatron_rl_cpu`, which `rollout_sglang.launch_args` sets on a machine without a GPU. Without this variable,
SGLang asks every plug-in and takes the only one that answers, even on a GPU.
"""

from __future__ import annotations

import os

NAME = "megatron_rl_cpu"


def activate() -> str | None:
    """Return the dotted path of the platform class if it is chosen. This is the entry point of the group `sglang.srt.platforms`."""
    return "rollout_sglang.platform.cpu.CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == NAME else None
