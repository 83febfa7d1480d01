"""The `[train]` section: layout, optimizer and micro-batches."""

from typing import Annotated, Literal, Self

from pydantic import Field

from megatron_rl.config.base import MAX_RANKS, MAX_STEPS, MAX_TOKENS, ConfigSection
from megatron_rl.config.change import FREELY, NAMED, NEVER, NO_RESULT, Change
from megatron_rl.errors import as_user_error
from parallel.layout import Layout

_ORDER = Change(
    FREELY,
    "Sums are added in another order, so results differ in rounding. `train.router_aux_loss` is a loss of each micro-batch, so it differs.",
)
_ADAM = Change(NAMED, "Changes optimizer steps. Adam's moments are kept.")
_BALANCE = Change(NAMED, "Balances experts differently.")


class LayoutConfig(ConfigSection):
    """How the model and the tokens are sharded over the trainer's ranks. The number of ranks is tp * cp * pp * dp."""

    on_resume = _ORDER

    tp: int = Field(1, ge=1, le=MAX_RANKS)
    """Tensor-parallel size."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks also shard the tokens in operations on single tokens, such as norms and residual additions."""
    pp: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of pipeline stages."""
    vpp: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of virtual stages per pipeline stage (interleaved schedule). More reduce the bubble but need more communication."""
    first_stage_layers: int = Field(0, ge=0, le=MAX_RANKS)
    """Number of layers in the first pipeline stage. 0 divides the remaining layers evenly among stages without a number."""
    last_stage_layers: int = Field(0, ge=0, le=MAX_RANKS)
    """Number of layers in the last pipeline stage, which also has the output layer. 0 divides layers evenly, as above."""
    cp: int = Field(1, ge=1, le=MAX_RANKS)
    """Context-parallel size: ranks that share the tokens of each sequence. tp * cp must divide the number of attention heads."""
    ep: int = Field(1, ge=1, le=MAX_RANKS)
    """Expert-parallel size for mixture-of-experts models. ep * etp must divide tp * cp * dp."""
    etp: int | None = Field(None, ge=1, le=MAX_RANKS)
    """Tensor-parallel size within an expert. Defaults to `tp`."""
    dp: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of data-parallel replicas."""

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def to_layout(self) -> Layout:
        """Return the sizes as a `Layout`. Raise UserError if they are inconsistent."""
        with as_user_error():
            return Layout(**{**self.model_dump(exclude={"sequence_parallel"}), "etp": self.etp or 0})


class TrainConfig(ConfigSection):
    """The optimizer and how a batch is split."""

    on_resume = Change(
        NAMED, "The new schedule of the learning rate applies as if the run had had it from the start. Adam's moments are kept."
    )

    layout: LayoutConfig = LayoutConfig()
    """Parallel layout of the trainer."""
    overlap_grad_reduce: Annotated[
        bool, Change(FREELY, "Changes no result, except in rounding with several replicas, which divide other buckets.")
    ] = True
    """Whether gradients are reduced bucket by bucket during the backward pass."""
    overlap_param_gather: Annotated[bool, NO_RESULT] = True
    """Whether updated weights are gathered bucket by bucket during the next forward pass."""
    two_batch_overlap: Annotated[
        Literal["off", "logprobs", "all"],
        Change(FREELY, "Changes no result, except in rounding with `vpp`, which packs micro-batches otherwise."),
    ] = "off"
    """Whether two micro-batches alternate, so that one computes while the other waits for communication between its ranks (tp, cp, ep).
    `logprobs`: only in log-prob passes. `all`: also in optimizer steps, which then keep the activations of both micro-batches and cannot
    recompute activations. Results do not change."""
    recompute: Annotated[Literal["none", "selective", "full"], NO_RESULT] = "none"
    """Activations that the backward pass recomputes to save memory. `selective`: logits and those within MLPs and experts. `full`: logits
    and all within a layer. On a CPU, logits are always recomputed."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of Adam, reached after `warmup_steps`."""
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS)
    """Optimizer steps of linear learning-rate warm-up."""
    decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"
    """How the learning rate decays to `min_learning_rate` after the warm-up. `WSD`: it stays constant until the last `wsd_decay_steps`."""
    decay_steps: Annotated[
        int, Change(NAMED, "Ends the decay of the learning rate. If it is 0, the number of steps that it stands for is compared.")
    ] = Field(0, ge=0, le=MAX_STEPS)
    """Optimizer steps until the decay ends, including the warm-up. 0 means the whole run."""
    wsd_decay_steps: int = Field(0, ge=0, le=MAX_STEPS)
    """Optimizer steps of the final linear decay of `WSD`."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Learning rate after the decay."""
    adam_beta1: Annotated[float, _ADAM] = Field(0.9, ge=0, lt=1)
    """Adam's decay rate of the first moment."""
    adam_beta2: Annotated[float, _ADAM] = Field(0.95, ge=0, lt=1)
    """Adam's decay rate of the second moment."""
    adam_eps: Annotated[float, _ADAM] = Field(1e-8, gt=0)
    """Adam's epsilon, added to the denominator."""
    weight_decay: Annotated[float, _ADAM] = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: Annotated[float, _ADAM] = Field(1.0, ge=0)
    """Maximum gradient norm. 0 disables clipping."""
    router_aux_loss: Annotated[float, _BALANCE] = Field(0.0, ge=0)
    """Weight of Megatron's load-balancing loss for experts, per token and layer. 0 disables it. See docs/guides/moe.md."""
    router_bias_rate: Annotated[float, _BALANCE] = Field(0.0, ge=0)
    """Step size of the router's correction bias, which balances expert load without a loss (DeepSeek-V3). It is added or subtracted in
    each optimizer step."""
    mtp_loss_scaling_factor: Annotated[
        float,
        Change(
            NAMED,
            "Changes the loss of the MTP layers. It cannot become 0 or stop being 0, because a checkpoint has trained MTP layers or not.",
        ),
    ] = Field(0.0, ge=0)
    """Weight of the loss of a model's multi-token prediction layers; only these layers learn from it. 0 keeps them unchanged. 0.1 and 0.2
    are common. See docs/guides/checkpoints.md."""
    micro_batch_tokens: Annotated[int, _ORDER] = Field(8192, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens per micro-batch of one rank, in which sequences are packed. A longer sequence gets its own micro-batch.
    Context-parallel ranks pack up to cp times as many tokens."""
    steps: Annotated[
        int, Change(FREELY, "Ends the run. A decay of the learning rate does not move with it unless `train.decay_steps` is named.")
    ] = Field(30, ge=1, le=MAX_STEPS)
    """Number of RL steps, which is also the number of policy versions."""
    seed: Annotated[int, Change(NEVER, "Sampling and the master weights of the reference are drawn from it.")] = 0
    """Random seed of the trainer and of sampling."""

    def count_at_once(self, layout: Layout, quantized: bool, trains: bool, recompute: str | None = None) -> int:
        """Return how many micro-batches alternate in a pass: 2 if this is allowed and the pass communicates, otherwise 1.

        Args:
            quantized: whether linear layers are quantized. Other linear layers are Megatron's, which wait for tensor-parallel ranks.
            trains: whether the pass computes gradients.
            recompute: what a planned candidate recomputes, instead of the configured `recompute`.
        """
        exchanges = layout.ep > 1 or layout.cp > 1 or (quantized and layout.tp > 1 and self.layout.sequence_parallel)
        wanted = self.two_batch_overlap == "all" and (recompute or self.recompute) == "none" if trains else self.two_batch_overlap != "off"
        return 2 if exchanges and wanted else 1

    def decay_over(self, optimizer_steps: int) -> Self:
        """Return this configuration with `decay_steps` set for a run of `optimizer_steps` steps."""
        return self.model_copy(update={"decay_steps": self.decay_steps or optimizer_steps})
