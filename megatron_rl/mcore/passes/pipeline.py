"""Messages between pipeline stages, without Megatron's exchange of shapes.

Micro-batches have different lengths, so Megatron's stages send each other the shape of every message and wait for the device. All stages
of a replica pack the same micro-batches, so here the receiver computes the shape itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

Shape = tuple[int, int, int]


class StageCommunicator(P2PCommunicator):
    """Megatron's communicator without messages about shapes, for one run of a schedule over rows of the given lengths."""

    def __init__(self, config: TransformerConfig, lengths: Sequence[int]) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        ranks = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        shapes = [(length // ranks, 1, config.hidden_size) for length in lengths]
        stage, last, chunks = self.pp_group.rank(), self.pp_group.size() - 1, self.virtual_pipeline_model_parallel_size or 1
        order = get_schedule_table(len(shapes), chunks, last + 1) if chunks > 1 else [(number, 0) for number in range(len(shapes))]
        # All but the model's first chunk receive activations. In the backward pass, the chunks are reversed, and all but the last receive
        # gradients.
        self._activations: Iterator[Shape] = iter([shapes[number] for number, chunk in order if stage > 0 or chunk > 0])
        self._gradients: Iterator[Shape] = iter([shapes[number] for number, chunk in order if stage < last or chunk > 0])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next activation and the next gradient to receive, or None for those not requested."""
        return next(self._activations) if recv_prev else None, next(self._gradients) if recv_next else None


def split_input(model: Any, rows: Sequence[int]) -> list[torch.Tensor | None]:
    """Return a stage's input of each of several concatenated micro-batches with `rows` positions each; None if there is nothing to
    split."""
    whole = model.decoder.input_tensor
    if whole is None or len(rows) == 1:
        return [None] * len(rows)
    return list(whole.split([len(whole) * row // sum(rows) for row in rows]))


def make_stage_options(config: TransformerConfig, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the options of a pipeline schedule over rows of the given lengths; {} without pipeline parallelism."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    groups = ["tp", "pp", "embd", "pos_embd", "cp", "dp_cp", "tp_dp_cp"]  # otherwise the schedules create them
    collection = ProcessGroupCollection.use_mpu_process_groups(groups)
    return {"p2p_communicator": StageCommunicator(config, lengths), "pg_collection": collection}
