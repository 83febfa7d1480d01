"""megatron-rl: reinforcement learning whose trainer and rollout engine compute one FP8 precision flow.

Importing this package costs nothing: no torch, no Megatron, no SGLang.
"""

import os

import parallel

__version__ = "0.1.0"

# All are read when torch is loaded. Threads that spin while they wait starve what runs beside them; those that sleep at once wake too late
# for small operators: 22 s for a step that takes 14 s with these spins of some 0.1 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# Of kernels made for one shape each, oneDNN keeps 1,024, about 1 MB each: micro-batches of ever new lengths filled gigabytes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

if getattr(parallel, "PROJECT", None) != "megatron-rl":
    raise ImportError(
        f"megatron_rl found a foreign package `parallel` at {getattr(parallel, '__file__', None) or list(parallel.__path__)}; "
        "uninstall it, or put the megatron-rl folder before it on PYTHONPATH"
    )
