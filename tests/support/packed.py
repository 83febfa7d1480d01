"""One batch in micro-batches of several sizes, and each sequence through the model without packing. Run in the ranks of a `World`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.mcore.logprobs import token_logprobs
from support.trainer import Trainer, negative_log_likelihood

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs of all answer tokens; gradient of their sum by parameter."""


def packed_and_alone(
    folder: Path, precision: dict[str, Any], batch: list[TrainingSample], bounds: list[int]
) -> tuple[torch.Tensor, list[Found]]:
    """(log-probs of each sequence alone, in the [1, s] form that is not packed; what micro-batches of each bound give)."""
    trainer = Trainer(folder, precision)
    return _unpacked(trainer, batch), [_packed(trainer, batch, bound) for bound in bounds]


def _packed(trainer: Trainer, batch: list[TrainingSample], bound: int) -> Found:
    def loss(logits: torch.Tensor, row: MicroBatch, _: Any) -> torch.Tensor:
        return negative_log_likelihood(token_logprobs(logits, row.targets, 1.0), row)[0]

    actor = trainer.actor
    actor.micro_batch_tokens = bound
    logprobs, _ = actor.compute_logprobs(batch)
    actor._forward_chunks[0].zero_grad_buffer()
    actor._run(batch, loss, forward_only=False)
    return torch.cat(logprobs), {name: parameter.main_grad.clone() for name, parameter in trainer.model.named_parameters()}


def _unpacked(trainer: Trainer, batch: list[TrainingSample]) -> torch.Tensor:
    found = []
    for sequence in batch:
        ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
        tokens = F.pad(ids, (0, 64 - ids.shape[1]))
        with torch.no_grad():
            logits = trainer.model(tokens, torch.arange(64).unsqueeze(0), None)
        found.append(token_logprobs(logits[:, : ids.shape[1] - 1], ids[:, 1:], 1.0)[0, len(sequence.prompt_ids) - 1 :])
    return torch.cat(found)
