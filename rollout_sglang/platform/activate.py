"""SGLang's platform plug-in for a plain CPU: no sgl_kernel, Triton or graphs, and emulated FP8 products. `rollout_sglang.launch_args`
chooses it by `SGLANG_PLATFORM` on a machine without a GPU. Without this variable, SGLang would take it even on a GPU."""

import os

NAME = "megatron_rl_cpu"


def activate() -> str | None:
    """Return the dotted path of the platform class if it is chosen. This is the entry point of the group `sglang.srt.platforms`."""
    return "rollout_sglang.platform.cpu.CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == NAME else None
