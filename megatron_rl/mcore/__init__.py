"""The Megatron-Core side: CPU platform, layers, model, optimizer and checkpoints."""

import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Megatron warns several times on import that Transformer Engine and apex are missing. `megatron-rl doctor` reports this once, with the fix.
warnings.filterwarnings("ignore", module=r"megatron\.core")
_NOTICES = {  # docs/decisions.md says why these three stay
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
}


def _is_news(record: logging.LogRecord) -> bool:
    return _NOTICES[record.name] not in record.getMessage()


for _name in _NOTICES:
    logging.getLogger(_name).addFilter(_is_news)

if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
    # Megatron imports the kernels of a feature for GPUs (`moe_paged_stash`) at its start.
    _kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    _kernels.GLOBAL_BLOCK_SIZE = _kernels.paged_stash_copy_kernel = _kernels.paged_stash_pop_kernel = None
    sys.modules[_kernels.__name__] = _kernels


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
