"""megatron-rl: reinforcement learning whose trainer and rollout engine compute one FP8 precision flow.

Importing this package costs nothing: no torch, no Megatron, no SGLang.
"""

import parallel

__version__ = "0.1.0"

if getattr(parallel, "PROJECT", None) != "megatron-rl":
    raise ImportError(
        f"megatron_rl found a foreign package `parallel` at {getattr(parallel, '__file__', None) or list(parallel.__path__)}; "
        "uninstall it, or put the megatron-rl folder before it on PYTHONPATH"
    )
