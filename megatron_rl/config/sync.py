"""The section `[sync]`: how weights travel to the engine. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.hosts import Host
from parallel.chunking import CHUNKS_IN_FLIGHT

Running = Literal["finish", "restart", "continue"]

_LARGEST_CHUNK = {"shared_memory": 4 << 20, "disk": 8 << 20, "process_group": 16 << 20, "gloo": 16 << 20, "cuda_ipc": 1 << 30}
"""Bytes. On a CPU, what stays in the cache between writer and reader moves faster; a GPU wants few launches."""


class SyncConfig(ConfigSection):
    """Moving weights from the actor to the engine. See docs/reference/sync.md."""

    transport: Literal["shared_memory", "process_group", "gloo", "cuda_ipc", "disk"] = "shared_memory"
    """`shared_memory`: one host, CPUs. `process_group`: any hosts, NCCL on GPUs and gloo on CPUs. `gloo`: any hosts, through the host's
    memory, also where trainer and engines share GPUs. `cuda_ipc`: one host with CUDA. `disk`: a shared folder, CPUs."""
    bucket_mb: int = Field(256, ge=1)
    """Most extra memory in MiB that a sync uses in one process, trainer or engine."""
    staged: bool = False
    """Transfer into a second copy of the weights in the engine while it goes on serving, so that only a local copy stops it."""
    running: Running = "finish"
    """Completions that run when the weights switch: wait until they are finished, throw them away and sample them anew, or keep their
    tokens and let the new weights go on from there."""
    proof: Literal["streamed", "reread"] = "reread"
    """`streamed`: both sides hash chunk by chunk, the engine out of its live weights as it writes. `reread`: again when all is done."""
    host: Host = "127.0.0.1"
    """process_group, gloo: address of the first trainer rank's host, where all ranks meet."""
    dir: Path | None = None
    """disk: the folder."""
    timeout: float = Field(600.0, gt=0)
    """Seconds one side waits for the other."""

    @property
    def chunk_bytes(self) -> int:
        """Largest chunk that is sent in one go."""
        return min((self.bucket_mb << 20) // CHUNKS_IN_FLIGHT, _LARGEST_CHUNK[self.transport])
