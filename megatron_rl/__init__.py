"""megatron-rl: reinforcement learning in one FP8 precision flow for trainer and inference engine.

Importing this package does not import torch, Megatron or SGLang.
"""

import os

import parallel

__version__ = "0.1.0"

# These variables are read when torch is loaded. Waiting threads that spin slow down other processes, and threads that sleep immediately
# wake too late for small operators: a step takes 22 s instead of 14 s. This spin count is about 0.1 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# By default, oneDNN caches 1,024 kernels of about 1 MB, one for each shape. Micro-batches of varying lengths then fill gigabytes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

if getattr(parallel, "PROJECT", None) != "megatron-rl":
    raise ImportError(
        f"megatron_rl found a foreign package `parallel` at {getattr(parallel, '__file__', None) or list(parallel.__path__)}; "
        "uninstall it, or put the megatron-rl folder before it on PYTHONPATH"
    )
