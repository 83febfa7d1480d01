"""The section `[sync]`: how weights travel to the engine. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.hosts import Host
from megatron_rl.errors import as_user_error
from parallel.chunking import CHUNKS_IN_FLIGHT
from parallel.transport import TRANSPORTS, load_transport
from parallel.transport.base import Transport

Running = Literal["finish", "restart", "continue"]


class SyncConfig(ConfigSection):
    """Moving weights from the actor to the engine. See docs/reference/sync.md."""

    transport: Annotated[str, AfterValidator(TRANSPORTS.check_name)] = "shared_memory"
    """`shared_memory`: one host, CPUs. `process_group`: any hosts, NCCL on GPUs and gloo on CPUs. `gloo`: any hosts, through the host's
    memory, also where trainer and engines share GPUs. `cuda_ipc`: one host with CUDA. `disk`: a shared folder, CPUs. Or your own as
    module:attribute."""
    bucket_mb: int = Field(256, ge=1)
    """Most extra memory in MiB that a sync uses in one process, trainer or engine."""
    staged: bool = False
    """Transfer into a second copy of the weights in the engine while it goes on serving, so that only a local copy stops it."""
    running: Running = "finish"
    """Completions that run when the weights switch: wait until they are finished, throw them away and sample them anew, or keep their
    tokens and let the new weights go on from there."""
    proof: Literal["streamed", "reread"] = "reread"
    """`streamed`: both sides hash chunk by chunk, the engine out of its live weights as it writes. `reread`: when all is done; on CPUs,
    without deltas, while the engine samples already and holds its answers back."""
    delta: Literal["auto", "on", "off"] = "off"
    """Send only the bytes that differ from those that the last sync proved; all bytes are proved all the same. Needs a copy of what the
    trainer sends in its hosts' memory; on CPUs. `auto`: not within one host, and not in a sync where it would save less than half."""
    canary: int = Field(2, ge=0)
    """Prompts that every engine answers first after a sync, for the trainer to compare before other answers are given; 0: none."""
    canary_bound: float | None = Field(None, ge=0, allow_inf_nan=True)
    """Largest |log p trainer - log p engine| of a canary's token, in nats; more ends the run. Default: 0 where the run promises exactness,
    else 1, or 5 where the engine alone is quantized; inf: only reported."""
    max_mismatch: float | None = Field(None, ge=0, allow_inf_nan=True)
    """Largest `mismatch/abs_max` of a step, in nats. Default: 0 where the run promises exactness, else inf."""
    on_mismatch: Literal["stop", "warn"] = "stop"
    """What a step does that has more: end the run before it learns from it, or warn in run.log, once until it is back."""
    host: Host = "127.0.0.1"
    """process_group, gloo: address of the first trainer rank's host, where all ranks meet."""
    dir: Path | None = None
    """disk: the folder."""
    timeout: float = Field(600.0, gt=0)
    """Seconds one side waits for the other."""

    @property
    def chunk_bytes(self) -> int:
        """Largest chunk that is sent in one go."""
        return min((self.bucket_mb << 20) // CHUNKS_IN_FLIGHT, self.load_transport().largest_chunk)

    def load_transport(self) -> Transport:
        """Return what `transport` names. Raises UserError where it cannot be imported."""
        with as_user_error():
            return load_transport(self.transport)
