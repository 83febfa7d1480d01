"""The state of all random number generators of a rank: Python, numpy, torch, the GPU and Megatron's tracker."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def seed_python_and_numpy(seed: int) -> None:
    """Seed Python's and numpy's generators, which Megatron leaves unseeded."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture_rng_state() -> dict[str, Any]:
    """Return a picklable copy of all generator states."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of `capture_rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])
