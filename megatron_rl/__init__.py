"""megatron-rl: reinforcement learning whose trainer and rollout engine compute one FP8 precision flow.

Importing this package costs nothing: no torch, no Megatron, no SGLang.
"""

import os

import parallel

__version__ = "0.1.0"

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # read when torch is loaded: its threads, which else spin, would starve what runs beside

if getattr(parallel, "PROJECT", None) != "megatron-rl":
    raise ImportError(
        f"megatron_rl found a foreign package `parallel` at {getattr(parallel, '__file__', None) or list(parallel.__path__)}; "
        "uninstall it, or put the megatron-rl folder before it on PYTHONPATH"
    )
