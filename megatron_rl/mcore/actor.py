"""The trained policy, the frozen reference and the critic: forward passes and optimizer steps on a Megatron model."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from megatron_rl.batch.micro_batch import MicroBatch, MicroBatches, make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import TrainConfig
from megatron_rl.distributed import gather_from_ranks, raise_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.mcore.base.master_slices import flatten_chained
from megatron_rl.mcore.base.names import ModelChunks, get_model_chunks, global_name, iter_modules
from megatron_rl.mcore.base.two_batch import run_in_turns
from megatron_rl.mcore.layers.linear.output_layer import Entropy, score_positions
from megatron_rl.mcore.layers.moe.experts import free_frozen_operands
from megatron_rl.mcore.layers.moe.router import ModelRouters
from megatron_rl.mcore.layers.moe.token_counts import UNKNOWN, KnownRoutes
from megatron_rl.mcore.layers.mtp import Lookahead, copy_embedding
from megatron_rl.mcore.optim.buckets import finish_gathers, start_gathers, wrap_chunks
from megatron_rl.mcore.optim.optimizer import LearningRateSchedule, OptimizerOffloader, build_optimizer
from megatron_rl.mcore.optim.quantizing_optimizer import check_finite
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.draws import DrawRecord, Draws
from megatron_rl.mcore.passes.logprobs import ScoredPositions
from megatron_rl.mcore.passes.packed_sequences import make_packed_params
from megatron_rl.mcore.passes.pipeline import make_stage_options, split_input
from megatron_rl.mcore.passes.sampled_scores import SampledScores
from megatron_rl.mcore.passes.shared_prefixes import SharedPrefixes, can_share
from megatron_rl.mcore.weights.step_response import StepResponse
from megatron_rl.metrics import declare
from megatron_rl.observability import profiling
from parallel.formats import BLOCK

Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Maps (log-probs [1, t], micro-batch) to (sum of token losses, sums of metrics). Also gets entropies [1, t] if it has `with_entropy`."""
TOTAL_LOSS, _POSITIONS = "loss/total", "tokens/places"  # keys of sums that `Actor.update` consumes; they are not reported as metrics
_PADDING = declare("tokens/padding", "share of micro-batch positions without a token", "share")
MTP_LOSS = declare("loss/mtp", "cross-entropy of the MTP layers per response token", "nats", "MTP loss (nats per token)", label="loss")
GRAD_NORM = declare("grad_norm", "norm of the gradient before clipping", "number", "norm before clipping", label="norm")
LEARNING_RATE = declare("learning_rate", "learning rate", "small")
_GATHERED = 16  # every backend can gather multiples of this many tokens


def count_row_multiple(config: Any, micro_batch_tokens: int, device: torch.device) -> int:
    """Return the number that micro-batch lengths must be a multiple of. Sequence-parallel ranks take equal parts of every row. On a GPU,
    each rank gets whole quantization blocks of tokens if that pads less than 1/24 of a row: ranks can then also gather the WGrad operands
    as bytes. Gathering the FProp and DGrad operands as bytes needs 1/8 of that."""
    if not config.sequence_parallel:
        return 1
    ranks, gathers = config.tensor_model_parallel_size, device.type == "cuda" and config.linear_format.quantized
    fitting = (ranks * tokens for tokens in (BLOCK, _GATHERED) if gathers and ranks * tokens * 24 <= micro_batch_tokens)
    return next(fitting, ranks)


@dataclass(frozen=True)
class _Row:
    """A micro-batch as this rank sees it."""

    batch: MicroBatch
    shard: ContextShard
    scored: ScoredPositions
    ahead: list[Lookahead]  # holds at most one element; empty if no MTP layers are run
    known: KnownRoutes  # expert token counts that are known before the pass
    draws: Draws | None  # to be recorded
    shared: SharedPrefixes | None  # None: all positions are computed


class Policy:
    """A Megatron model that computes log-probs. The reference is a plain `Policy`; the trained policy is an `Actor`."""

    def __init__(self, model: ModelChunks, temperature: float, micro_batch_tokens: int) -> None:
        self.model, self.temperature, self.micro_batch_tokens = model, temperature, micro_batch_tokens
        self.chunks = get_model_chunks(model)
        self.routing = ModelRouters(self.chunks)
        self._forward_chunks: list[Any] = list(self.chunks)
        self._device = next(self.chunks[0].parameters()).device
        self._draw_record: DrawRecord | None = None
        self._shares_prefixes = can_share(self.chunks[0].config, self._device)

    @property
    def attention_length(self) -> float:
        """Sequence length at which attention costs as much as the linear layers (`ModelGeometry.attention_length`)."""
        return float(self.chunks[0].config.attention_length)

    def compute_logprobs(self, samples: list[TrainingSample]) -> tuple[list[torch.Tensor], float]:
        """Return (log-probs of each sample's sampled tokens, float32 [A]; mean entropy in nats per response token), without gradient.
        Collective: every rank passes the samples of its replica. The log-probs are those of the replica; the entropy is over all
        replicas."""
        with torch.no_grad():
            return self.routing.follow_forecast(partial(self._score, samples)).gather()

    @contextmanager
    def record_draws(self) -> Iterator[DrawRecord]:
        """Context manager in which a pass, forward or with an update, records the samples' `TrainingSample.draws`. A forward pass
        replaces what an earlier one has recorded."""
        self._draw_record = DrawRecord()
        try:
            yield self._draw_record
        finally:
            self._draw_record = None

    def _score(self, samples: list[TrainingSample]) -> SampledScores:
        """Run a pass without gradient and return this rank's scores."""
        scores = SampledScores(samples, self._device)
        if self._draw_record is not None:
            self._draw_record.reset()

        def collect(row: torch.Tensor, batch: MicroBatch, shard: ContextShard, scored: ScoredPositions) -> torch.Tensor:
            scores.add(batch, *(shard.gather_row(scored.restore(values)) for values in row.unbind(-1)))
            return row.new_zeros(())

        self._run(samples, collect, forward_only=True, entropy=Entropy.VALUE)
        return scores

    def make_micro_batches(self, samples: list[TrainingSample], at_once: int = 1) -> MicroBatches:
        """Pack this replica's samples into micro-batches, the same number on every replica. `at_once` micro-batches take turns.
        Collective."""
        config = self.chunks[0].config
        return make_micro_batches(
            samples,
            self.micro_batch_tokens,
            multiple=count_row_multiple(config, self.micro_batch_tokens, self._device),
            cp_size=config.context_parallel_size,
            vpp_group=config.pipeline_model_parallel_size * at_once if len(self.chunks) > 1 else 1,  # interleaved stages need whole rounds
            agree=reduce.max_over_replicas,
            attention_length=config.attention_length,
            padding_experts=self.routing.agree_on_padding(samples),
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return this rank's logits [1, t, vocab / tp] of a micro-batch without a pipeline schedule (pp = 1)."""
        return self._forward(self._forward_chunks[0], batch, ContextShard.for_this_rank(batch.lengths).to(self._device))

    def _forward(
        self, chunk: Any, batch: MicroBatch, shard: ContextShard, known: KnownRoutes = UNKNOWN, shared: SharedPrefixes | None = None
    ) -> torch.Tensor:
        """Return a stage's output for this rank's positions: on the last stage logits [1, t / cp, vocab / tp] or scores
        (`score_positions`). With `shared`, only its positions are computed."""
        tokens, positions = shard.select(batch.tokens), shard.select(batch.positions)
        if shared is not None:
            tokens, positions = tokens[:, shared.computed], positions[:, shared.computed]
        packed_params = make_packed_params(batch.lengths, shard, positions)
        if shared is not None:
            packed_params.groups = shared.place(packed_params.groups)
        experts = shard.select(batch.routed_experts) if len(batch.routed_experts) else batch.routed_experts
        with self.routing.bind_micro_batch(chunk, shard.select(batch.token_indices), experts, not batch.sample_indices, known):
            return chunk(tokens, positions, None, packed_seq_params=packed_params)

    def _run(
        self,
        samples: list[TrainingSample],
        loss: Callable[..., torch.Tensor],
        forward_only: bool,
        entropy: Entropy = Entropy.NONE,
        mtp_layers: int = 0,
    ) -> None:
        """Run Megatron's schedule once over this replica's micro-batches. Gradients are those of the loss summed over all replicas, divided
        by the number of response tokens.

        Args:
            loss: maps (log-probs [1, n] or, unless `entropy` is NONE, log-probs and entropies [1, n, 2]; micro-batch; this rank's shard;
                scored positions; the `Lookahead` if `mtp_layers`) to a sum over tokens. Called on the last pipeline stage only.
            mtp_layers: number of multi-token prediction layers to run.
        """
        at_once = self.chunks[0].config.at_once[not forward_only]
        batches = self.make_micro_batches(samples, at_once)
        routes = self.routing.count_ahead(batches)
        widths = [sum(batches.widths[first : first + at_once]) for first in range(0, len(batches), at_once)]

        def prepare(batch: MicroBatch, known: KnownRoutes) -> _Row:
            profiling.begin_micro_batch()
            shard = ContextShard.for_this_rank(batch.lengths)
            scored = ScoredPositions.from_mask(shard.select(batch.mask))  # counts on the CPU, without waiting for the GPU
            ahead = [Lookahead.from_micro_batch(batch, shard, mtp_layers).to(self._device)] if mtp_layers else []
            draws = None
            if self._draw_record is not None:
                marked = scored.select(shard.select(batch.draws)) if len(batch.draws) else batch.draws
                draws = Draws.choose(marked, scored.select(shard.select(batch.token_indices)), self._draw_record)
            shared = SharedPrefixes.find(batch) if self._shares_prefixes else None
            return _Row(batch.to(self._device), shard.to(self._device), scored.to(self._device), ahead, known, draws, shared)

        def forward(chunk: Any, row: _Row, stage_input: torch.Tensor | None) -> torch.Tensor:
            model = unwrap_model(chunk)
            if stage_input is not None:
                model.set_input_tensor(stage_input)
            targets = replace(row.scored.select_targets(row.batch, row.shard, self.temperature), draws=row.draws)
            ahead = model.look_ahead(*row.ahead) if row.ahead else nullcontext()
            index = row.scored.index if row.shared is None else row.shared.places[row.scored.index]
            with score_positions(model, index, targets, entropy), ahead:
                return self._forward(chunk, row.batch, row.shard, row.known, row.shared)

        def forward_step(iterator: Any, chunk: Any) -> Any:
            model, rows = unwrap_model(chunk), [prepare(*each) for each in islice(iterator, at_once)]
            masks = [row.shard.select(row.batch.mask) for row in rows]
            inputs = split_input(model, [row.batch.tokens.numel() for row in rows])
            passes = [partial(forward, chunk, row, stage_input) for row, stage_input in zip(rows, inputs, strict=True)]
            outputs = run_in_turns(passes, model.config.sequence_parallel) if at_once > 1 else [passes[0]()]
            model.set_input_tensor(None)  # otherwise Megatron keeps the input and its gradient until the next micro-batch

            def sum_losses(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict]:
                losses = [loss(scores, row.batch, row.shard, row.scored, *row.ahead) for scores, row in zip(outputs, rows, strict=True)]
                tokens = torch.stack([mask.sum() for mask in masks]).sum().int()  # Megatron sums them over all ranks
                return sum(losses[1:], losses[0]), tokens, {}

            return outputs if model.post_process else outputs[0] if at_once == 1 else torch.cat(outputs), sum_losses

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[zip(batches, routes, strict=True) for _ in self.chunks],
            model=self._forward_chunks,
            num_microbatches=len(widths),
            seq_length=max(widths),
            micro_batch_size=1,
            forward_only=forward_only,
            **make_stage_options(self.chunks[0].config, widths),
        )


class Actor(Policy):
    """The trained policy: Adam on FP32 masters in Megatron's distributed optimizer, which quantizes the FP8 blocks after every step."""

    def __init__(self, model: ModelChunks, train: TrainConfig, temperature: float) -> None:
        super().__init__(model, temperature, train.micro_batch_tokens)
        self._train, self.steps_done, self.routing.replay_enabled = train, 0, True
        self._mtp_layers: int = self.chunks[0].config.trained_mtp_layers
        self._forward_chunks = wrap_chunks(self.chunks, train)
        self.optimizer = build_optimizer(self._forward_chunks, train)
        self.learning_rate: Callable[[int], float] = LearningRateSchedule(self.optimizer, train)
        self.response: StepResponse | None = StepResponse(self.chunks, self.optimizer)
        self.offloader = OptimizerOffloader(self._forward_chunks, self.optimizer, self._device)

    def offload_optimizer(self) -> None:
        """Free the device memory that only `update` needs (`OptimizerOffloader`). No effect on a CPU."""
        if self._device.type != "cpu":
            free_frozen_operands(self.chunks)
            get_global_memory_buffer().buffer.clear()  # buffers in which Megatron's layers gather their inputs
            self.offloader.offload()

    def reload_optimizer(self) -> None:
        """Undo `offload_optimizer`."""
        self.offloader.reload()

    def update(
        self, samples: list[TrainingSample], loss: Loss, check: Callable[[list[torch.Tensor], float], None] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step on the samples of all replicas; return its metrics, the same on all ranks. The loss's metrics are means
        over response tokens. Collective: every rank passes the samples of its replica. Raise RunError if the loss or the gradient is not
        finite; the weights are then unchanged.

        `check` is called before the weights change with what `compute_logprobs(samples)` would return. It may raise."""
        own_tokens, own_places = (sum(counts) for counts in ([s.sampled_count for s in samples], [s.length - 1 for s in samples]))
        sampled_tokens, all_tokens = reduce.sum_over_replicas(own_tokens, own_places)
        tokens = max(sampled_tokens, 1)
        # each router weights its loss by all tokens, but Megatron divides the gradient by the sampled tokens
        self.routing.set_aux_loss_coeff(self._train.router_aux_loss * tokens / all_tokens)
        for chunk in self._forward_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.routing.restore_biases_on_error():
            scores = None if check is None else SampledScores(samples, self._device)
            sums = self._accumulate_gradients(samples, loss, scores)
            if check is not None and scores is not None:
                check(*scores.gather())
            padding = sums.pop(_PADDING) / sums.pop(_POSITIONS)
            means = {name: value / tokens for name, value in sums.items()}
            if not math.isfinite(means[TOTAL_LOSS]):
                cause = self._find_nonfinite_activation(samples)
                raise RunError(f"the loss of optimizer step {self.steps_done + 1} is {means[TOTAL_LOSS]}{cause}")
            self._check_gradients_finite()
        learning_rate = self.learning_rate(self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.steps_done += 1  # incremented first: a step that fails midway leaves weights of no known version
        if self.response:
            self.response.begin(self.steps_done)
        _, grad_norm, _ = self.optimizer.step()
        check_finite(flatten_chained(self.optimizer))
        start_gathers(self._forward_chunks)
        response = self.response.end() if self.response else {}
        return {**means, _PADDING: padding, GRAD_NORM: float(grad_norm), LEARNING_RATE: learning_rate, **response}

    def _accumulate_gradients(self, samples: list[TrainingSample], loss: Loss, scores: SampledScores | None) -> dict[str, float]:
        """Run forward and backward passes of all samples; return the loss's metrics summed over all ranks, and add to `scores`."""
        sums: dict[str, Any] = {}
        with_entropy, factor = getattr(loss, "with_entropy", False), self._train.mtp_loss_scaling_factor
        entropy = Entropy.GRADIENT if with_entropy else Entropy.NONE if scores is None else Entropy.VALUE
        if self._mtp_layers and self.chunks[0].config.pipeline_model_parallel_size > 1:
            finish_gathers(self.model)
            copy_embedding(self.chunks)

        def compute_loss(
            row: torch.Tensor, batch: MicroBatch, shard: ContextShard, scored: ScoredPositions, ahead: Lookahead | None = None
        ) -> torch.Tensor:
            values = [row] if entropy is Entropy.NONE else row.unbind(-1)
            logprobs, *entropies = (shard.gather_row(scored.restore(each)) for each in values)
            if scores is not None:
                scores.add(batch, logprobs.detach(), entropies[0].detach())
            total, metrics = loss(logprobs, batch, *(entropies if with_entropy else ()))  # the same on all context-parallel ranks
            if ahead is not None:
                of_layers = ahead.compute_loss()
                total, metrics = total + factor * of_layers, {**metrics, MTP_LOSS: of_layers.detach()}
            counts: dict[str, Any] = {_POSITIONS: batch.tokens.numel(), _PADDING: batch.padding}
            for name, value in {TOTAL_LOSS: total.detach(), **metrics, **counts}.items():
                sums[name] = sums.get(name, 0.0) + (value.double() if isinstance(value, torch.Tensor) else value)
            return total

        self._run(samples, compute_loss, forward_only=False, entropy=entropy, mtp_layers=self._mtp_layers)
        return reduce.sum_by_name(sums)

    def _find_nonfinite_activation(self, samples: list[TrainingSample]) -> str:
        """Return the part of an error message that names the first module with inf or NaN in its output, or "". Runs a forward pass.
        Collective."""
        names: list[str] = []

        def check_output(name: str, _: Any, __: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if any(isinstance(x, torch.Tensor) and x.is_floating_point() and not bool(torch.isfinite(x).all()) for x in tensors):
                names.append(name)

        with torch.no_grad(), ExitStack() as hooks:
            for chunk, name, module in iter_modules(self.model):
                if name and not isinstance(module, torch.nn.ModuleList):
                    hooks.enter_context(module.register_forward_hook(partial(check_output, global_name(chunk, name))))
            self._run(samples, lambda scores, *_: scores.new_zeros(()), forward_only=True, entropy=Entropy.VALUE)
        name = next(filter(None, gather_from_ranks(names[0] if names else "", str)), "")  # earlier pipeline stages have lower ranks
        return f"; the first module with inf or NaN in its output is {name}" if name else ""

    def _check_gradients_finite(self) -> None:
        """Raise RunError on every rank if a gradient holds inf or NaN, and name the parameter, or if the norm of all gradients overflows.
        Megatron would clip such gradients to 0."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())  # the same on all ranks
        if math.isfinite(norm):
            return
        parameters = ((chunk, *named) for chunk in self.chunks for named in chunk.named_parameters())
        nonfinite = (global_name(chunk, name) for chunk, name, parameter in parameters if not bool(parameter.main_grad.isfinite().all()))
        bad, step = next(nonfinite, ""), self.steps_done + 1
        raise_on_all_ranks(RunError(f"the gradient of {bad} holds inf or NaN in optimizer step {step}") if bad else None)
        raise RunError(
            f"the norm of the gradient is {norm} in optimizer step {step}, although all gradients are finite: they are too large"
        )


class Critic(Actor):
    """The critic of PPO: an actor whose model is built from `parallel.model_geometry.as_critic`. No engine ever receives it."""

    def __init__(self, model: ModelChunks, train: TrainConfig) -> None:
        super().__init__(model, train, temperature=1.0)
        self.routing.replay_enabled = False  # the recorded experts are the policy's

    def compute_values(self, samples: list[TrainingSample]) -> list[torch.Tensor]:
        """Return the value before each sampled token of this replica's samples, float32 [A] each, without gradient. Collective."""
        return self.compute_logprobs(samples)[0]
