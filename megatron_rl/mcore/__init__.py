"""Everything that knows Megatron-Core: the CPU platform, the layers, the model, the optimizer, the checkpoints."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# On import Megatron warns several times that Transformer Engine and apex are missing; `megatron-rl doctor` says it once, with the cure.
warnings.filterwarnings("ignore", module=r"megatron\.core")


@contextmanager
def wandb_hidden() -> Iterator[None]:
    """Import Megatron in here as where wandb is not installed: it would import it, a second on every rank, and a run logs by its own
    trackers (`log.trackers`)."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["wandb"]
