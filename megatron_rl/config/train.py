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
    first_stage_layers: int = Field(0, ge=0)
    """Layers of the first pipeline stage; 0: as many as all other stages that are given no number."""
    last_stage_layers: int = Field(0, ge=0)
    """Layers of the last pipeline stage, which has the output layer too; 0: as many as all others that are given no number."""
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
            return Layout(**{**self.model_dump(exclude={"sequence_parallel"}), "etp": self.etp or 0})


class TrainConfig(ConfigSection):
    """The optimizer and how a batch is cut."""

    layout: LayoutConfig = LayoutConfig()
    overlap_grad_reduce: bool = True
    """Replicas sum gradients bucket by bucket while the backward pass goes on."""
    overlap_param_gather: bool = True
    """Replicas gather the stepped weights bucket by bucket while the next forward pass goes on."""
    two_batch_overlap: Literal["off", "logprobs", "all"] = "off"
    """Two micro-batches take turns: while one waits for tensor- or expert-parallel ranks, the other computes. In log-probs alone, or in
    optimizer steps too, which then keep the activations of both, unless they recompute any. The numbers stay the same."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes anew instead of keeping them: logits and those within MLPs and experts (`selective`), or
    logits and all within a layer (`full`). A CPU always computes logits anew."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of Adam, reached after `warmup_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of a linear warm-up."""
    decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"
    """How the learning rate falls to `min_learning_rate` after the warm-up; `WSD`: it stays, and falls over the last `wsd_decay_steps`."""
    decay_steps: int = Field(0, ge=0)
    """Optimizer steps after which it has fallen, the warm-up included; 0: all of the run."""
    wsd_decay_steps: int = Field(0, ge=0)
    """Optimizer steps of the fall of `WSD`, which is linear."""
    min_learning_rate: float = Field(0.0, ge=0)
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
    mtp_loss_scaling_factor: float = Field(0.0, ge=0)
    """Weight of the loss of a model's layers for multi-token prediction, which these alone learn from; 0: they are kept as they came. 0.1
    and 0.2 are common. See docs/guides/checkpoints.md."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass of one rank, most: sequences are laid end to end up to it. A longer sequence has a pass of its own. Context
    parallel ranks lay up to cp times as many."""
    steps: int = Field(30, ge=1)
    """RL steps (policy versions) of the run."""
    seed: int = 0

    def count_at_once(self, layout: Layout, quantized: bool, trains: bool) -> int:
        """Return how many micro-batches take turns in a pass: two where they may, and exchange anything meanwhile. `quantized`: the linear
        layers are; others are Megatron's, which wait for tensor-parallel ranks. `trains`: the pass has a gradient."""
        exchanges = layout.ep > 1 or (quantized and layout.tp > 1 and self.layout.sequence_parallel)
        wanted = self.two_batch_overlap == "all" and self.recompute == "none" if trains else self.two_batch_overlap != "off"
        return 2 if exchanges and wanted else 1

    def decay_over(self, optimizer_steps: int) -> TrainConfig:
        """Return this with `decay_steps` filled in for a run of so many steps."""
        return self.model_copy(update={"decay_steps": self.decay_steps or optimizer_steps})
