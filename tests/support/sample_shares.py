"""What each rank gets of samples that rank 0 has."""

from __future__ import annotations

import copy
from unittest import mock

from megatron_rl.batch.packing import compute_costs, deal
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.distributed import is_rank0
from megatron_rl.mcore.passes import replicas
from parallel.layout import Layout
from support.trainer import start


def scatter(samples: list[TrainingSample], layout: Layout, piece_bytes: int) -> list[TrainingSample]:
    """This rank's, sent in pieces of so many bytes."""
    start(layout)
    shares = deal(compute_costs([sample.length for sample in samples]), layout.dp) if is_rank0() else []
    with mock.patch.object(replicas, "PIECE_BYTES", piece_bytes):
        own = replicas.scatter_samples([[samples[index] for index in share] for share in shares])
    return copy.deepcopy(own)  # a tensor that goes to another process leaves its memory, where NumPy still looks for kept tokens
