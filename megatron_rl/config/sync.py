"""The `[sync]` section. See docs/reference/sync.md."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from megatron_rl.config.base import MAX_COUNT, MAX_MB, MAX_SECONDS, ConfigSection
from megatron_rl.config.change import FREELY, NAMED, Change
from megatron_rl.config.hosts import Host
from megatron_rl.errors import as_user_error
from parallel.chunking import CHUNKS_IN_FLIGHT
from parallel.transport import TRANSPORTS, load_transport
from parallel.transport.base import Transport

Running = Literal["finish", "restart", "continue"]


_STOP = Change(FREELY, "Only decides when the run stops.")


class SyncConfig(ConfigSection):
    """Weight sync from the trainer to the engines."""

    on_resume = Change(FREELY, "The same bytes are sent and proved.")

    transport: Annotated[str, AfterValidator(TRANSPORTS.check_name)] = "shared_memory"
    """`shared_memory`: one host, CPUs. `process_group`: any hosts, NCCL on GPUs and gloo on CPUs. `gloo`: any hosts, through host memory,
    even if trainer and engines share GPUs. `cuda_ipc`: one host with CUDA. `disk`: a shared folder, CPUs. Or your own as
    `module:attribute`."""
    bucket_mb: int = Field(256, ge=1, le=MAX_MB)
    """Maximum additional memory in MiB that a sync uses in one trainer or engine process."""
    staged: bool = False
    """Whether to transfer into a second copy of the weights while the engine keeps serving. The engine then only pauses for a local copy,
    but needs twice the memory for weights."""
    running: Annotated[Running, Change(NAMED, "Changes which policy versions sample a completion.")] = "finish"
    """What happens to unfinished completions when the weights change. `finish`: wait for them. `restart`: discard them and sample them
    again. `continue`: keep their tokens and continue with the new weights."""
    proof: Literal["streamed", "reread"] = "reread"
    """When the hashes that prove a sync are computed. `streamed`: chunk by chunk, from the engine's weights while they are written.
    `reread`: after the sync. On CPUs without deltas, the engine already samples meanwhile and holds its responses back."""
    delta: Literal["auto", "on", "off"] = "off"
    """Whether to send only the bytes that changed since the last proved sync. All bytes are still proved. CPU only, and needs a copy of the
    sent weights in the trainer's host memory. `auto`: only between hosts, and only for syncs in which it saves at least half."""
    canary: Annotated[int, _STOP] = Field(2, ge=0, le=MAX_COUNT)
    """Number of prompts that each engine answers first after a sync. The trainer compares their log-probs before it accepts other
    responses. 0 disables the canary. A run that samples ahead (`placement.max_staleness`) also asks the canary in steps that have no other
    token to compare. Without the canary, such a run ends if `max_mismatch` bounds no token for some steps."""
    canary_bound: Annotated[float | None, _STOP] = Field(None, ge=0, allow_inf_nan=True)
    """Maximum |log p trainer - log p engine| of a canary token in nats. A larger value ends the run; `inf` only reports it. Defaults to 0
    if the run guarantees exactness, otherwise to 5 if only the engine is quantized, and to 1 in all other cases."""
    max_mismatch: Annotated[float | None, _STOP] = Field(None, ge=0, allow_inf_nan=True)
    """Maximum `mismatch/abs_max` of a step in nats. Defaults to 0 if the run guarantees exactness, otherwise to `inf`."""
    on_mismatch: Annotated[Literal["stop", "warn"], _STOP] = "stop"
    """What happens if a step exceeds `max_mismatch`. `stop`: end the run before it trains on the step. `warn`: write one warning to run.log
    until the mismatch is back within the bound."""
    host: Host = "127.0.0.1"
    """`process_group`, `gloo`: address of the first trainer rank's host, which all ranks connect to."""
    dir: Path | None = None
    """`disk`: the shared folder."""
    timeout: float = Field(600.0, gt=0, le=MAX_SECONDS)
    """Seconds that the trainer and the engines wait for each other."""

    @property
    def chunk_bytes(self) -> int:
        """Maximum size of a chunk in bytes."""
        return min((self.bucket_mb << 20) // CHUNKS_IN_FLIGHT, self.load_transport().largest_chunk)

    def load_transport(self) -> Transport:
        """Return the transport. Raise UserError if it cannot be imported."""
        with as_user_error():
            return load_transport(self.transport)
