"""The Megatron-Core side: CPU platform, layers, model, optimizer and checkpoints."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Megatron warns several times on import that Transformer Engine and apex are missing. `megatron-rl doctor` reports this once, with the fix.
warnings.filterwarnings("ignore", module=r"megatron\.core")


@contextmanager
def wandb_hidden() -> Iterator[None]:
    """Context manager that hides wandb from Megatron's imports. Megatron would import wandb, which takes a second on every rank and is not
    needed."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]
