"""The policy in training and the frozen reference: forward passes, optimizer steps, and the blocks they leave for the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.batch import MicroBatch, Sequence, micro_batches
from megatron_rl.config import Train
from megatron_rl.errors import RunError
from megatron_rl.mcore import gather
from megatron_rl.mcore.linear import quantize_model
from megatron_rl.mcore.logprobs import token_entropy, token_logprobs
from megatron_rl.mcore.names import global_name
from megatron_rl.ranks import raise_together

Loss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log-probs [b, s], micro-batch) -> (sum of token losses, sums of metrics)."""


class Policy:
    """A Megatron model that can be asked for log-probs. The reference is one of these; the actor is one that learns."""

    def __init__(self, model: GPTModel, temperature: float, micro_batch_size: int) -> None:
        self.model, self.temperature, self.micro_batch_size = model, temperature, micro_batch_size
        self._forward_model: Any = model
        quantize_model(model)

    def logprobs(self, sequences: list[Sequence]) -> tuple[list[torch.Tensor], float]:
        """(log-probs of each sequence's answer tokens float32 [A], mean entropy in nats per answer token); no gradient.

        Collective: every rank gives all sequences, computes its replica's share and is told all results.
        """
        lengths = [len(sequence.answer_ids) for sequence in sequences]
        flat = torch.zeros(sum(lengths))
        found = flat.split(lengths)
        entropy = 0.0

        def collect(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            nonlocal entropy
            for index, answer in batch.answers(token_logprobs(logits, batch.targets, self.temperature), sequences):
                found[index].copy_(answer)
            entropy += float((token_entropy(logits, self.temperature) * batch.mask).sum())
            return logits.new_zeros(())

        with torch.no_grad():
            self._run(sequences, collect, forward_only=True)
        gather.sum_values(flat)
        return list(found), gather.sum_by_name({"entropy": entropy})["entropy"] / max(sum(lengths), 1)

    def _run(self, sequences: list[Sequence], loss: Callable[[torch.Tensor, MicroBatch], torch.Tensor], forward_only: bool) -> None:
        """One pass of Megatron's schedule over this replica's micro-batches; `loss` maps (logits, micro-batch) to a sum over tokens.

        It is called on the last pipeline stage only. Gradients are those of the sum over all replicas, divided by all answer tokens.
        """
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        config = self.model.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1  # ranks take equal parts of every sequence
        batches = micro_batches(sequences, self.micro_batch_size, replica, replicas, multiple)

        def step(iterator: Any, model: Any) -> Any:
            batch = next(iterator)
            logits = model(batch.tokens, batch.positions, None)
            return logits, lambda output: (loss(output, batch), batch.mask.sum().int(), {})

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=self._forward_model,
            num_microbatches=len(batches),
            seq_length=max(batch.tokens.shape[1] for batch in batches),
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )


class Actor(Policy):
    """The policy in training: Adam on FP32 masters through Megatron's optimizer, blocks quantised once after every step."""

    def __init__(self, model: GPTModel, train: Train, temperature: float) -> None:
        super().__init__(model, temperature, train.micro_batch_size)
        self.steps_done = 0
        self._train = train
        config = model.config
        self._forward_model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=train.learning_rate,
                weight_decay=train.weight_decay,
                adam_beta1=train.adam_beta1,
                adam_beta2=train.adam_beta2,
                adam_eps=train.adam_eps,
                clip_grad=train.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
            ),
            [self._forward_model],
        )

    def update(self, sequences: list[Sequence], loss: Loss) -> dict[str, float]:
        """One optimizer step on all sequences. Returns `grad_norm`, `learning_rate` and the loss's metrics, means over answer tokens.

        Collective: every rank gives all sequences and gets the same result. Raises RunError when the loss or the gradient is not
        finite; the weights are then as they were.
        """
        own: dict[str, float] = {}

        def with_metrics(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            total, metrics = loss(token_logprobs(logits, batch.targets, self.temperature), batch)
            for name, value in {"loss/total": total.detach(), **metrics}.items():
                own[name] = own.get(name, 0.0) + float(value)
            return total

        self._forward_model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(sequences, with_metrics, forward_only=False)
        tokens = max(sum(len(sequence.answer_ids) for sequence in sequences), 1)
        means = {name: value / tokens for name, value in gather.sum_by_name(own).items()}
        if not math.isfinite(means["loss/total"]):
            raise RunError(f"the loss of optimizer step {self.steps_done + 1} is {means['loss/total']}")
        self._refuse_bad_gradients()
        learning_rate = self._set_learning_rate()
        self.steps_done += 1  # before it begins: a step that breaks off leaves a policy that is nobody's
        _, grad_norm, _ = self.optimizer.step()
        quantize_model(self.model)
        return {**means, "grad_norm": float(grad_norm), "learning_rate": learning_rate}

    def _refuse_bad_gradients(self) -> None:
        """Raises RunError on every rank when a gradient anywhere holds inf or NaN, naming it where it is held."""
        parameters = self.model.named_parameters()
        bad = next((global_name(self.model, name) for name, parameter in parameters if not torch.isfinite(parameter.main_grad).all()), "")
        error = RunError(f"the gradient of {bad} holds inf or NaN in optimizer step {self.steps_done + 1}") if bad else None
        raise_together(error)

    def _set_learning_rate(self) -> float:
        """Linear warm-up, then constant."""
        rate = self._train.learning_rate * min(1.0, (self.steps_done + 1) / max(self._train.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate
