"""The optimizer of an actor and its learning rate schedule, both Megatron's own, and the offloading of memory that only steps need."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import TrainConfig
from megatron_rl.mcore.base.master_slices import flatten_chained, iter_masters
from megatron_rl.mcore.base.names import global_name, iter_modules
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of Adam's state of a parameter."""


def build_optimizer(wrapped_chunks: list[Any], train: TrainConfig) -> Any:
    """Return Megatron's distributed optimizer for chunks wrapped in DistributedDataParallel, with the masters of quantized layers."""
    config, chunks = wrapped_chunks[0].config, [wrapped.module for wrapped in wrapped_chunks]
    options = OptimizerConfig(
        optimizer="adam",
        lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(options, wrapped_chunks, use_gloo_process_groups=False)
    layers = {global_name(chunk, f"{name}.weight"): layer for chunk, name, layer in iter_modules(chunks, QuantizedLinear)}
    for part in flatten_chained(optimizer):
        part.take_layers(layers)
    return optimizer


class LearningRateSchedule:
    """Warm-up, then `train.decay_style`. A function of the number of completed steps, so there is no state to checkpoint.
    `train.decay_steps` must be set (`TrainConfig.decay_over`) unless the rate is constant."""

    def __init__(self, optimizer: Any, train: TrainConfig) -> None:
        self._warmup_steps = train.warmup_steps
        self._schedule = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=train.learning_rate,
            min_lr=train.min_learning_rate,
            lr_warmup_steps=train.warmup_steps,
            lr_decay_steps=max(train.decay_steps, train.warmup_steps + 1),
            lr_decay_style=train.decay_style,
            start_wd=train.weight_decay,
            end_wd=train.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            wsd_decay_steps=train.wsd_decay_steps,
            lr_wsd_decay_style="linear",
        )

    def __call__(self, done: int) -> float:
        """Return the learning rate of the step after `done` completed steps."""
        self._schedule.num_steps = done + (done < self._warmup_steps)  # Megatron's first warm-up step would have rate 0
        return float(self._schedule.get_lr({}))


class OptimizerOffloader:
    """Offloads Adam's moments, separate FP32 masters and gradients, and reloads them. Both methods are idempotent.

    Moments and masters are copied to host buffers that are allocated once. Gradients are freed without a copy, since they are zeroed before
    each step. FP32 weights that are their own masters stay; Megatron's `offload_to_cpu` would move them too, along with norms and
    embeddings that the sync reads. Checkpoints can be written while the state is offloaded.
    """

    def __init__(self, wrapped_chunks: list[Any], optimizer: Any, device: torch.device) -> None:
        """`wrapped_chunks` are the DistributedDataParallel wrappers, which own the gradients."""
        self.gradient_buffers = [buffer for chunk in wrapped_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._optimizers, self._device = flatten_chained(optimizer), device
        self._host: dict[tuple[int, str], torch.Tensor] = {}
        self._offloaded = False

    def offload(self) -> None:
        """Free the device memory. No optimizer step is possible until `reload`."""
        if self._offloaded:
            return
        self._move(self._host_copy)
        for buffer in self.gradient_buffers:
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies must finish before their sources are freed
            torch.cuda.empty_cache()
        self._offloaded = True

    def reload(self) -> None:
        """Undo `offload`. Gradients are zero."""
        if not self._offloaded:
            return
        self._move(lambda _, tensor: tensor.to(self._device, non_blocking=True, copy=True))
        for buffer in self.gradient_buffers:
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        self._offloaded = False

    def _move(self, copy: Any) -> None:
        """Replace every tensor by `copy(key, tensor)`."""
        for part in self._optimizers:
            for state in part.optimizer.state.values():
                for kind in MOMENTS:
                    if kind in state:
                        state[kind] = copy((id(state), kind), state[kind])
            for _, master in iter_masters(part):
                master.data = copy((id(master), "master"), master.data)

    def _host_copy(self, key: tuple[int, str], tensor: torch.Tensor) -> torch.Tensor:
        if key not in self._host:
            self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
        return self._host[key].copy_(tensor, non_blocking=True)
