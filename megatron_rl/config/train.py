"""The section `[train]`: layout, optimizer, micro-batches. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.errors import as_user_error
from parallel.layout import Layout


class LayoutConfig(ConfigSection):
    """How the trainer's ranks share model and tokens. tp * cp * pp * dp is the number of ranks."""

    tp: int = Field(1, ge=1)
    """Tensor parallel ranks."""
    sequence_parallel: bool = True
    """Tensor parallel ranks share the tokens, too, where each token is computed by itself (norms, residuals)."""
    pp: int = Field(1, ge=1)
    """Pipeline stages."""
    vpp: int = Field(1, ge=1)
    """Parts of every pipeline stage, which take turns (the interleaved schedule): a smaller bubble, more messages."""
    cp: int = Field(1, ge=1)
    """Context parallel ranks, which share the tokens of every sequence; tp * cp divides the attention heads."""
    ep: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts model; ep * etp divides tp * dp."""
    etp: int | None = Field(None, ge=1)
    """Tensor parallel ranks within an expert; as many as `tp` where it is not given."""
    dp: int = Field(1, ge=1)
    """Data parallel replicas."""

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def to_layout(self) -> Layout:
        """Return the sizes as a `Layout`. Raise UserError where they are none."""
        with as_user_error():
            return Layout(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp or 0, dp=self.dp, cp=self.cp)


class TrainConfig(ConfigSection):
    """The optimizer and how a batch is cut."""

    layout: LayoutConfig = LayoutConfig()
    distributed_optimizer: bool = True
    """The dp * cp ranks that hold the same weights share Adam's state (and the FP32 masters of BF16 weights)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes anew instead of keeping them: those within MLPs and experts (`selective`), or all within
    a layer (`full`)."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of Adam, reached after `warmup_steps`, then constant unless `decay_steps` is given."""
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate falls linearly to 0, counted from the first; 0: it stays."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 turns clipping off."""
    router_aux_loss: float = Field(0.0, ge=0)
    """Weight of Megatron's load-balancing loss of experts, per token and layer; 0 turns it off. See docs/guides/moe.md."""
    router_bias_rate: float = Field(0.0, ge=0)
    """What an optimizer step adds to or takes from a router's correction bias (DeepSeek-V3), which balances load without a loss."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass of one rank, most: sequences are laid end to end up to it. A longer sequence has a pass of its own. Context
    parallel ranks lay up to cp times as many."""
    steps: int = Field(30, ge=1)
    """RL steps (policy versions) of the run."""
    seed: int = 0

    def compute_learning_rate(self, done: int) -> float:
        """Return the learning rate after `done` optimizer steps: a linear warm-up, times a linear decay where one is asked for."""
        warm_up = min(1.0, (done + 1) / max(self.warmup_steps, 1))
        decay = max(0.0, 1 - done / self.decay_steps) if self.decay_steps else 1.0
        return self.learning_rate * warm_up * decay
