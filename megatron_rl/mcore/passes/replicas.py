"""Distribution of samples to data-parallel replicas: the tensor-, pipeline- and context-parallel ranks that train on the same samples.

Rank 0 sends each replica its samples in pieces of bounded size. They go to the replica's first rank, along its pipeline, and from there
to all ranks of each stage. No rank but rank 0 ever holds more than its replica's share. If engines keep the columns of samples, every
replica's first rank fetches those of its share and sends them the same way.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.batch.packing import compute_costs, deal
from megatron_rl.batch.sample_bytes import SampleBytes, read_samples
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.distributed import errors_on_all_ranks, is_rank0, run_on_rank0

PIECE_BYTES = 16 << 20
Fetch = Callable[[list[TrainingSample]], list[TrainingSample]]


def select_own(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Return this replica's share of samples that every rank holds."""
    return _deal(samples, math.inf)[parallel_state.get_data_parallel_rank()]


def _deal(samples: Sequence[TrainingSample], attention_length: float) -> list[list[TrainingSample]]:
    """Return each replica's share of samples, which all cost about the same (`batch.packing`)."""
    shares = deal(compute_costs([sample.length for sample in samples], attention_length), parallel_state.get_data_parallel_world_size())
    return [[samples[index] for index in share] for share in shares]


def share_out(samples: Sequence[TrainingSample], attention_length: float = math.inf, fetch: Fetch = list) -> list[TrainingSample]:
    """Send each replica its share of rank 0's samples; return this replica's, without fields that the trainer computes, as views of one
    buffer. What other ranks pass does not matter. `fetch`: returns samples with the columns that engines keep. Collective."""
    outgoing = [SampleBytes(share) for share in _deal(samples, attention_length)] if is_rank0() else []
    what = run_on_rank0(lambda: ([share.total for share in outgoing], any(each.remote for each in samples)), tuple[list[int], bool])
    sizes, is_remote = what
    replica, firsts = parallel_state.get_data_parallel_rank(), dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    for target in range(1, len(outgoing)):
        for piece in outgoing[target].iterate(PIECE_BYTES):
            _on_device(piece, partial(dist.send, dst=firsts[target]))
    own = read_samples(_pass_all(sizes[replica], outgoing[0].iterate(PIECE_BYTES) if outgoing else None))
    return _fetch(own, fetch) if is_remote else own


def _fetch(own: list[TrainingSample], fetch: Fetch) -> list[TrainingSample]:
    """Return this replica's samples with their columns, which its first rank fetches and passes on. Collective."""
    whole = None
    with errors_on_all_ranks():
        if parallel_state.get_pipeline_model_parallel_rank() == parallel_state.get_tensor_and_context_parallel_group().rank() == 0:
            whole = SampleBytes(fetch(own))
    size = torch.tensor([0 if whole is None else whole.total])
    _on_device(size, partial(_pass_on, received=True))
    return read_samples(_pass_all(int(size), None if whole is None else whole.iterate(PIECE_BYTES), received=True))


def _pass_all(size: int, pieces: Iterator[torch.Tensor] | None, received: bool = False) -> torch.Tensor:
    """Return a replica's samples as `size` bytes. `pieces`: all bytes, on the rank that has them: rank 0, or with `received` the replica's
    first rank."""
    data = torch.empty(size, dtype=torch.uint8)
    for part in data.split(PIECE_BYTES):
        if pieces is not None:
            part.copy_(next(pieces))
        _on_device(part, partial(_pass_on, received=received or pieces is not None))
    return data


def _pass_on(data: torch.Tensor, received: bool) -> None:
    """Send `data` to every rank of the replica. `received` says that its first rank holds the data already."""
    pipeline, stage = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_tensor_and_context_parallel_group()
    if stage.rank() == 0:
        if pipeline.rank() == 0 and not received:
            dist.recv(data, 0)
        if pipeline.size() > 1:
            dist.broadcast(data, dist.get_global_rank(pipeline, 0), group=pipeline)
    if stage.size() > 1:
        dist.broadcast(data, dist.get_global_rank(stage, 0), group=stage)


def _on_device(data: torch.Tensor, transfer: Callable[[torch.Tensor], object]) -> None:
    """Transfer host memory in place, through the GPU if there is one."""
    staged = data.cuda() if torch.cuda.is_available() else data
    transfer(staged)
    if staged is not data:
        data.copy_(staged)
