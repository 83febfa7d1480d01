"""The policy in training and the frozen reference: forward passes, optimizer steps, and the blocks they leave for the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.batch import MicroBatch, Sequence, micro_batches
from megatron_rl.config import Train
from megatron_rl.errors import RunError
from megatron_rl.mcore.linear import quantize_model
from megatron_rl.mcore.logprobs import token_entropy, token_logprobs
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
        """(log-probs of each sequence's answer tokens float32 [A], mean entropy in nats per answer token); no gradient."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        entropy_sum, tokens = 0.0, 0.0

        def collect(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            nonlocal entropy_sum, tokens
            for index, answer in batch.answers(token_logprobs(logits, batch.targets, self.temperature), sequences):
                found[index] = answer.clone()
            entropy_sum += float((token_entropy(logits, self.temperature) * batch.mask).sum())
            tokens += float(batch.mask.sum())
            return logits.new_zeros(())

        with torch.no_grad():
            self._run(micro_batches(sequences, self.micro_batch_size), collect, forward_only=True)
        return found, entropy_sum / max(tokens, 1.0)

    def _run(self, batches: list[MicroBatch], loss: Callable[[torch.Tensor, MicroBatch], torch.Tensor], forward_only: bool) -> None:
        """One pass of Megatron's schedule over all micro-batches; `loss` maps (logits, micro-batch) to a scalar."""

        def step(iterator: Any, model: Any) -> Any:
            batch = next(iterator)
            logits = model(batch.tokens, batch.positions, None)
            # the schedule divides each scalar by the number of micro-batches; ours are parts of one sum
            return logits, lambda output: (loss(output, batch) * len(batches), {})

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

        Raises RunError when the loss or the gradient is not finite; the weights are then as they were.
        """
        batches = micro_batches(sequences, self.micro_batch_size)
        tokens = sum(float(batch.mask.sum()) for batch in batches)
        sums: dict[str, float] = {"loss/total": 0.0}

        def normalised(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            total, metrics = loss(token_logprobs(logits, batch.targets, self.temperature), batch)
            for name, value in {"loss/total": total.detach(), **metrics}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            return total / tokens

        self._forward_model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(batches, normalised, forward_only=False)
        if not torch.isfinite(torch.tensor(sums["loss/total"])):
            raise RunError(f"the loss of optimizer step {self.steps_done + 1} is {sums['loss/total']}")
        self._refuse_bad_gradients()
        learning_rate = self._set_learning_rate()
        _, grad_norm, _ = self.optimizer.step()
        self.steps_done += 1
        quantize_model(self.model)
        return {name: value / tokens for name, value in sums.items()} | {"grad_norm": float(grad_norm), "learning_rate": learning_rate}

    def _refuse_bad_gradients(self) -> None:
        """Raises RunError on every rank when a gradient anywhere holds inf or NaN, naming it where it is held."""
        parameters = self.model.named_parameters()
        bad = next((name for name, parameter in parameters if not torch.isfinite(parameter.main_grad).all()), "")
        error = RunError(f"the gradient of {bad} holds inf or NaN in optimizer step {self.steps_done + 1}") if bad else None
        raise_together(error)

    def _set_learning_rate(self) -> float:
        """Linear warm-up, then constant."""
        rate = self._train.learning_rate * min(1.0, (self.steps_done + 1) / max(self._train.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate
