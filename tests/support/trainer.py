"""A Megatron trainer on the ranks of a `World`, and what tests ask of it."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.packing import compute_costs, deal
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig, TrainConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.distributed import is_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.align import Alignment
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import describe_weights, write_checkpoint
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.mcore.actor import Actor, Policy
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter, load_run_checkpoint
from megatron_rl.mcore.checkpoint.optimizer import MOMENTS
from megatron_rl.mcore.checkpoint.run_weights import RunWeights
from megatron_rl.mcore.layers import spec
from megatron_rl.mcore.layers.linear.output_layer import score_positions
from megatron_rl.mcore.layers.linear.quantized_linear import disable_quantization, find_quantized_layers
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.mcore.optim import step_response
from megatron_rl.mcore.optim.master_slices import flatten_chained, iter_masters, iter_stepped
from megatron_rl.mcore.optim.quantizing_optimizer import requantize
from megatron_rl.mcore.passes import logprobs as scoring
from megatron_rl.mcore.passes import reduce, replicas
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.logprobs import ScoredPositions
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.weights import export as exports
from megatron_rl.mcore.weights.adapters import install_adapters
from megatron_rl.mcore.weights.cache_scales import collect_scales, renew_scales
from megatron_rl.mcore.weights.export import export_checkpoint
from megatron_rl.mcore.weights.load_weights import (
    build_rank_shards,
    collect_named_tensors,
    find_weight_layers,
    global_parameters,
    load_checkpoint,
)
from megatron_rl.mcore.weights.master_spread import MasterSpread
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize
from parallel.digest import make_stored_tensors, view_rect
from parallel.formats import FormatOf
from parallel.layout import Coordinates, Layout
from parallel.megatron_shards import build_megatron_shards, build_trainer_shards
from parallel.model_geometry import ModelGeometry, with_trained_mtp
from parallel.reshard import Transfer, add_scale_transfers, reshard


def gather_tensors(
    named_tensors: dict[str, torch.Tensor], model: ModelGeometry, layout: Layout, format_of: FormatOf
) -> dict[str, torch.Tensor]:
    """Gather the checkpoint's tensors, in their formats, from every rank's `collect_named_tensors`. Return them on rank 0, and an empty
    dict on other ranks. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = build_trainer_shards(model, layout, format_of=format_of)
    checkpoint_shards = model.build_checkpoint_shards()
    own: list[tuple[Transfer, torch.Tensor]] = []
    for transfer in add_scale_transfers(reshard(sources, {0: checkpoint_shards}, format_of)):
        if transfer.source_rank == rank:
            values = view_rect(named_tensors[transfer.source], transfer.source_rect)
            values = values.clone(memory_format=torch.contiguous_format)  # of a view, pickle takes the whole buffer, a model's
            own.append((transfer, values.view(torch.uint8) if values.itemsize == 1 else values))  # gloo and pickle know no float8
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(own, gathered)
    if gathered is None:
        return {}
    tensors = make_stored_tensors(checkpoint_shards, format_of)
    for transfer, values in (pair for pairs in gathered for pair in pairs):
        target = view_rect(tensors[transfer.target], transfer.target_rect)
        target.copy_(values.view(target.dtype) if values.itemsize == 1 else values)
    return tensors


def save_live(to: Path, trainer: Any) -> None:
    """Write what an engine gets from a trainer as a Hugging Face checkpoint. Collective."""
    geometry = ModelGeometry.from_hf_config(trainer.hf_config)
    contract: PrecisionContract = trainer.contract
    tensors = gather_tensors(trainer.collect_named_tensors(), geometry, trainer.layout, contract.format_of)
    if tensors:
        to.mkdir(parents=True)
        write_checkpoint(to, describe_weights(trainer.hf_config, contract), tensors, trainer.folder)
    dist.barrier()


TRAIN = {"learning_rate": 1e-3, "micro_batch_tokens": 100}
STILL = {"learning_rate": 1e-12, "clip_grad": 0.0}
"""Settings of `train` whose updates compute gradients but change no weight."""


class Trainer:
    """An actor of a checkpoint on this rank. Without a layout, all ranks are tensor-parallel."""

    def __init__(
        self,
        folder: Path,
        precision: dict[str, Any],
        train: dict[str, Any] | None = None,
        temperature: float = 1.0,
        layout: Layout | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        self.layout = start(layout)
        self.folder, self.precision = folder, PrecisionConfig(**precision)
        self.hf_config = read_config(folder)
        self.contract = PrecisionContract.from_config(self.precision)
        self.train = TrainConfig(**{**TRAIN, **(train or {})})
        if self.train.mtp_loss_scaling_factor:
            self.hf_config = with_trained_mtp(self.hf_config)
        self.shards = build_rank_shards(self.hf_config, self.layout)
        self.model = build_model(self.hf_config, self.layout, self.contract, self.train)
        spread = MasterSpread(self.train.seed, self.contract) if precision.get("masters") == "spread" else None  # where a test asks for it
        load_checkpoint(self.model, folder, self.shards, spread)
        for layer in (layer for chunk in get_model_chunks(self.model) for layer in chunk.decoder.layers):
            layer.register_forward_hook(refuse_graph)
        if lora is not None:
            install_adapters(self.model, lora, self.train.seed)
        self.actor = Actor(self.model, self.train, temperature)
        if spread:
            spread.spread_optimizer(self.actor.optimizer, self.shards, global_parameters(self.model))

    def collect_named_tensors(self) -> dict[str, torch.Tensor]:
        return collect_named_tensors(self.model, self.shards, self.contract)

    def collect_tensors(self, fp8: bool) -> dict[str, torch.Tensor]:
        """Return the whole model by Hugging Face name on rank 0: FP32 masters, or with `fp8` what an engine gets: blocks (as uint8) or
        INT8 channels, and scales."""
        contract = self.contract if fp8 else PrecisionContract.from_config(PrecisionConfig(mode="bf16", high="fp32"))
        geometry = ModelGeometry.from_hf_config(self.hf_config)
        named_tensors, as_fp32 = collect_named_tensors(self.model, self.shards, contract), replace(contract, high="fp32")
        tensors = gather_tensors(named_tensors, geometry, self.layout, as_fp32.format_of)
        return {name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in tensors.items()}

    def collect_weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"masters": self.collect_tensors(fp8=False), "blocks": self.collect_tensors(fp8=True)}

    def collect_masters(self) -> dict[str, torch.Tensor]:
        """Return by Hugging Face name on rank 0 what Adam steps, in float32: the parameters, or their masters in the optimizer."""
        masters = {}
        stepped = (entry for part in flatten_chained(self.actor.optimizer) for entry in iter_stepped(part))
        names = {id(parameter): name for name, parameter in global_parameters(self.model).items()}
        for parameter, master in stepped:
            masters[names[id(parameter)]] = master.gather(parameter.shape)
        as_fp32 = PrecisionContract.from_config(PrecisionConfig(mode="bf16", high="fp32"))
        return gather_tensors(masters, ModelGeometry.from_hf_config(self.hf_config), self.layout, as_fp32.format_of)

    def dump_bytes(self) -> dict[str, bytes]:
        """Return the raw bytes of every parameter, FP8 block and master slice of this rank."""
        names = {id(parameter): name for name, parameter in global_parameters(self.model).items()}
        return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in self.collect_named_tensors().items()} | {
            f"master {names[id(parameter)]}": master.values.detach().view(torch.uint8).numpy().tobytes()
            for part in flatten_chained(self.actor.optimizer)
            for parameter, master in iter_stepped(part)
        }

    def save(self, to: Path, step: int = 1, with_optimizer: bool = False, **state: Any) -> Path:
        """Write a run's checkpoint, by default of the weights alone."""
        state = {"step": step, "policy_version": step, "precision": self.precision.model_dump(mode="json"), **state}
        optimizer = self.actor.optimizer if with_optimizer else None
        CheckpointWriter(to, self.model, read_config(self.folder), self.folder, state, optimizer).finish()
        return to

    def differentiate(self, batch: list[TrainingSample], between: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Return this replica's log-probs of a batch and the gradients of an update on it. `between` is called before the update."""
        share = own(batch)
        logprobs, _ = self.actor.compute_logprobs(batch if self.layout.dp == 1 else share)
        between()
        self.actor.update(share, negative_log_likelihood)
        gradients = {name: weight.main_grad.clone() for name, weight in self.model.named_parameters()}
        return {"logprobs": torch.cat(logprobs), "gradients": gradients}


def refuse_graph(layer: Any, _: Any, output: Any) -> None:
    """Assert that a pass without gradient keeps no graph, which would hold the tensors of all layers."""
    assert torch.is_grad_enabled() or not output[0].requires_grad, f"layer {layer.layer_number}"


def start(layout: Layout | None = None) -> Layout:
    """Join the process groups and create Megatron's, again if the layout differs from the current one. Return the layout."""
    layout = layout or Layout(tp=int(os.environ.get("WORLD_SIZE", "1")))
    if not _runs(layout):
        leave_layout()
        start_megatron(layout, seed=0)
        torch.set_num_threads(1)
    return layout


def own(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Number the samples, which every rank has, and return this replica's share."""
    return select_own([replace(sample, number=number) for number, sample in enumerate(samples)])


def gather(share: list[TrainingSample], values: list[Any]) -> list[Any]:
    """Return the values of all replicas' samples, in order. `values` belong to the `share` that `own` returned."""
    parts = reduce.gather_from_replicas({sample.number: value for sample, value in zip(share, values, strict=True)})
    return [value for _, value in sorted((entry for part in parts for entry in part.items()), key=lambda entry: entry[0])]


def compute_logprobs(policy: Policy, samples: list[TrainingSample]) -> tuple[list[torch.Tensor], float]:
    """Compute log-probs of samples that every rank has. Return those of all replicas on every rank."""
    share = own(samples)
    logprobs, entropy = policy.compute_logprobs(share)
    return gather(share, logprobs), entropy


def leave_layout() -> None:
    """Destroy Megatron's process groups. Megatron only forgets them, but each keeps two gloo threads, and a layout has dozens."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    gc.collect()  # models hold groups, in cycles
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _runs(layout: Layout) -> bool:
    if not parallel_state.is_initialized() or layout.vpp != (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1):
        return False
    return all(
        size == group.size()
        for size, group in (
            (layout.tp, parallel_state.get_tensor_model_parallel_group()),
            (layout.pp, parallel_state.get_pipeline_model_parallel_group()),
            (layout.cp, parallel_state.get_context_parallel_group()),
            (layout.ep, parallel_state.get_expert_model_parallel_group()),
            (layout.etp, parallel_state.get_expert_tensor_parallel_group()),
        )
    )


def loaded(folder: Path, precision: dict[str, Any], layout: Layout | None = None) -> dict[str, torch.Tensor]:
    """Return what an engine gets (blocks, scales, the rest) of a checkpoint that was just loaded."""
    return Trainer(folder, precision, layout=layout).collect_tensors(fp8=True)


def logits(folder: Path, precision: dict[str, Any], ids: list[list[int]]) -> torch.Tensor:
    """Return this rank's slice of the vocabulary: float32 `[b, s, vocab / tp]`."""
    tokens, model = torch.tensor(ids), Trainer(folder, precision).model
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous(), None).float()


def text_logprobs(folder: Path, precision: dict[str, Any], documents: list[list[int]]) -> torch.Tensor:
    """Return the log-probs of every token but the first of each document, packed into micro-batches as in a step."""
    samples = [TrainingSample(ids[:1], ids[1:]) for ids in documents]
    return torch.cat(Trainer(folder, precision).actor.compute_logprobs(samples)[0])


def train_grpo(
    folder: Path,
    precision: dict[str, Any],
    train: dict[str, Any],
    batches: list[list[TrainingSample]],
    layout: Layout | None = None,
    kl_coef: float = 0.1,
) -> dict[str, Any]:
    """Train by GRPO with a KL term on every batch. Return log-probs before and after, metrics of the steps, and the weights on rank 0. The
    response of a step is computed from all weights."""
    with mock.patch.object(step_response, "_ELEMENTS", 1 << 30):
        trainer = Trainer(folder, precision, train, layout=layout)
    loss = PolicyLoss(AlgorithmConfig(kl_coef=kl_coef))
    before, entropy = compute_logprobs(trainer.actor, batches[0])
    with renew_scales(trainer.model):
        steps = [trainer.actor.update(own(batch), loss) for batch in batches]
    after, _ = compute_logprobs(trainer.actor, batches[0])
    return {
        "scales": collect_scales(trainer.model),
        "before": torch.cat(before),
        "entropy": entropy,
        "steps": steps,
        "after": torch.cat(after),
        **trainer.collect_weights(),
    }


def measure_response(
    folder: Path,
    precision: dict[str, Any],
    train: dict[str, Any],
    batches: list[list[TrainingSample]],
    layout: Layout | None = None,
    elements: int = 1 << 30,
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return for each step its response from a sample of `elements` values, and the response of the whole model's tensors. The latter is
    on rank 0 only, and requires that masters are FP32 parameters."""
    with mock.patch.object(step_response, "_ELEMENTS", elements), mock.patch.object(step_response, "_MIN_STRIPS", 1):
        trainer = Trainer(folder, precision, train, layout=layout)
    names, results = (step_response.RESPONSE, step_response.CHANGED), []

    def read() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine, format = trainer.collect_tensors(fp8=True), trainer.contract.engine_format
        blocks = {name: engine.get(format.scale_name(name)) for name in engine} if format.scale_suffix else {}
        data = {name: engine[name].view(getattr(torch, format.dtype)) for name, scale in blocks.items() if scale is not None}
        values = {name: dequantize(QuantizedWeight(data[name], blocks[name]), format) for name in data}
        return values, trainer.collect_tensors(fp8=False)

    for batch in batches:
        engine, masters = ({name: tensor.clone() for name, tensor in tensors.items()} for tensors in read())
        step = trainer.actor.update(own(batch), negative_log_likelihood)
        new_engine, new_masters = read()
        moved = [(new_engine[name] - engine[name]).abs() for name in engine]
        stepped = sum(float((new_masters[name] - masters[name]).abs().double().sum()) for name in engine)
        changed = sum(int((values > 0).sum()) for values in moved) / max(sum(values.numel() for values in moved), 1)
        whole = (sum(float(values.double().sum()) for values in moved) / stepped, changed) if stepped else (0.0, 0.0)
        results.append(({name: step[name] for name in names if name in step}, dict(zip(names, whole, strict=True))))
    return results


def logprobs_without_fp8(folder: Path, precision: dict[str, Any], batch: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """Return the log-probs of all responses with the precision's quantization, without quantization, and with it again."""
    trainer = Trainer(folder, precision, layout=Layout(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    logprobs = [torch.cat(compute_logprobs(trainer.actor, batch)[0])]
    with disable_quantization(trainer.model):
        logprobs.append(torch.cat(compute_logprobs(trainer.actor, batch)[0]))
    logprobs.append(torch.cat(compute_logprobs(trainer.actor, batch)[0]))
    return dict(zip(("with", "without", "again"), logprobs, strict=True))


def learn_text(folder: Path, precision: dict[str, Any], train: dict[str, Any], batch: list[TrainingSample], steps: int) -> dict[str, Any]:
    """Take supervised steps on one batch. Return losses, dtypes of parameters and of masters, and how far each master moved."""
    trainer = Trainer(folder, precision, train)
    named = dict(trainer.model.named_parameters())
    stepped = {id(parameter): master for part in flatten_chained(trainer.actor.optimizer) for parameter, master in iter_stepped(part)}
    masters = {name: stepped[id(parameter)].values for name, parameter in named.items()}
    start_values = {name: master.detach().clone() for name, master in masters.items()}
    losses = [trainer.actor.update(own(batch), negative_log_likelihood)["loss/total"] for _ in range(steps)]
    return {
        "losses": losses,
        "dtypes": {name: str(parameter.dtype) for name, parameter in named.items()},
        "masters": {str(master.dtype) for master in masters.values()},
        "fp8": [f"{name}.weight" for name in find_quantized_layers(trainer.model)],
        "moved": {name: float((master.detach() - start_values[name]).abs().max()) for name, master in masters.items()},
    }


def poison_weight(folder: Path, precision: dict[str, Any], name: str, layout: Layout | None = None) -> None:
    """Write a NaN into one master on every rank that holds it, then quantize. Propagates the error."""
    trainer = Trainer(folder, precision, layout=layout)
    layer = find_weight_layers(trainer.model).get(name)
    if layer is not None and layer.master.values.numel():
        layer.master.values.data[layer.master.values.numel() // 3] = float("nan")
    requantize(trainer.actor.optimizer)


def poison_rollout_weight(folder: Path, precision: dict[str, Any], name: str) -> None:
    """Write an infinity into one parameter on rank 0, then collect what a sync sends. Propagates the error."""
    trainer = Trainer(folder, precision)
    if dist.get_rank() == 0:
        dict(trainer.model.named_parameters())[name].data[3, 5] = float("inf")
    trainer.collect_named_tensors()


def poison_updates(
    folder: Path, precision: dict[str, Any], batch: list[TrainingSample], faults: list[str], layout: Layout | None = None
) -> dict[str, tuple[str, list[str]]]:
    """Run updates that are not finite, after a good one: in the "loss", only in the "gradient", or in an "activation". Return for each
    fault the error message and the names whose bytes changed."""
    trainer = Trainer(folder, precision, layout=layout)
    trainer.actor.update(own(batch), negative_log_likelihood)
    before, results = trainer.dump_bytes(), {}
    for fault in faults:
        if fault == "activation":
            layer = trainer.model.decoder.layers[1].mlp.linear_fc1
            layer.register_forward_hook(lambda _, __, output: (output[0] * float("inf"), *output[1:]))
        try:
            trainer.actor.update(own(batch), _POISONED_LOSSES.get(fault, negative_log_likelihood))
            message = ""
        except RunError as error:
            message = str(error)
        after = trainer.dump_bytes()
        results[fault] = message, [name for name in before if before[name] != after[name]]
    return results


def _nan_loss(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    total, metrics = negative_log_likelihood(logprobs, batch)
    return total * float("nan"), metrics


def _nan_gradient(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a finite loss with a NaN gradient: sqrt has an infinite slope at 0, and inf * 0 is NaN."""
    total, metrics = negative_log_likelihood(logprobs, batch)
    return total + torch.sqrt(logprobs * 0).sum(), metrics


_POISONED_LOSSES = {"loss": _nan_loss, "gradient": _nan_gradient}


def save_checkpoint(
    folder: Path,
    precision: dict[str, Any],
    batch: list[TrainingSample],
    to: Path,
    layout: Layout | None = None,
    train: dict[str, Any] | None = None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Take one step, then write a checkpoint, with the optimizer if `train` is given. Return the masters and blocks that it holds."""
    trainer = Trainer(folder, precision, train, layout=layout)
    trainer.actor.update(own(batch), negative_log_likelihood)
    trainer.save(to, with_optimizer=train is not None)
    return trainer.collect_weights()


def resume_checkpoint(folder: Path, precision: dict[str, Any], run: Path, layout: Layout, train: dict[str, Any]) -> dict[str, Any]:
    """Return the masters and blocks of a trainer that has loaded a run's checkpoint."""
    trainer = Trainer(folder, precision, train, layout=layout)
    load_run_checkpoint(run, trainer.model, trainer.actor.optimizer, json.loads((run / "state.json").read_bytes()), same_layout=False)
    return trainer.collect_weights()


def export(checkpoint: Path, to: Path, precision: str, alignment: Alignment | None = None) -> Path:
    """Run the command `export` in a process without process groups."""
    stop_megatron()
    export_checkpoint(checkpoint, to, precision, alignment)
    stop_megatron()
    return to


def latent_attention(absorbed: bool) -> Any:
    """Context manager in which models are built with the absorbed, or the expanded, form of latent attention."""
    return mock.patch.object(spec, "takes_absorbed_form", return_value=absorbed)


def packed_and_alone(
    folder: Path, precision: dict[str, Any], batch: list[TrainingSample], bounds: list[int]
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Return the log-probs of each sample alone, as an unpacked row, and `Trainer.differentiate` for each bound of a micro-batch."""
    trainer, packed = Trainer(folder, precision, STILL), []
    for bound in bounds:
        trainer.actor.micro_batch_tokens = bound
        packed.append(trainer.differentiate(batch))
    return _unpacked(trainer, batch), packed


def _unpacked(trainer: Trainer, batch: list[TrainingSample]) -> torch.Tensor:
    logprobs = []
    for sequence in batch:
        ids = sequence.ids.long().unsqueeze(0)
        tokens = F.pad(ids, (0, 64 - ids.shape[1]))
        with torch.no_grad():
            logits = trainer.model(tokens, torch.arange(64).unsqueeze(0), None)
        row = tree.log_softmax(logits[0, len(sequence.prompt_ids) - 1 : ids.shape[1] - 1].float())
        logprobs.append(row.gather(-1, sequence.response_ids.long().unsqueeze(-1)).squeeze(-1))
    return torch.cat(logprobs)


def gradients(folder: Path, precision: dict[str, Any], recompute: str) -> dict[str, torch.Tensor]:
    """Return this rank's gradients of an arbitrary loss under sequence parallelism. FP8 layers add theirs to a gradient buffer."""
    model = Trainer(folder, precision, {"recompute": recompute}).actor.model
    assert model.config.sequence_parallel
    for layer in find_quantized_layers(model).values():
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    runs: list[int] = []
    first = model.decoder.layers[0].mlp.linear_fc1
    first.register_forward_hook(lambda *_: runs.append(1))
    tokens = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(3))
    model.train()
    logits = model(tokens, torch.arange(48).expand(4, 48).contiguous(), None)
    logits.float().square().mean().backward()
    assert len(runs) == (1 if recompute == "none" else 2), f"the layer ran {len(runs)} times"
    return {name: getattr(p, "main_grad", p.grad).clone() for name, p in model.named_parameters()}


def train_with_offload(
    folder: Path, to: Path, precision: dict[str, Any], batches: list[list[TrainingSample]], offload: bool, dp: int = 1
) -> dict[str, Any]:
    """Take steps, with the optimizer state offloaded between them if `offload`; compute log-probs and write a checkpoint in between.
    Return bytes of gradients, log-probs, addresses of the state before and after, and the bytes of the weights."""
    trainer = Trainer(folder, precision, {"learning_rate": 3e-3}, layout=Layout(dp=dp))
    actor, offloader = trainer.actor, trainer.actor.offloader
    gradients, logprobs, addresses = [], [], []
    for number, batch in enumerate(batches):
        offloader.reload()
        offloader.reload()
        actor.update(own(batch), PolicyLoss(AlgorithmConfig()))
        addresses.append(_addresses(actor.optimizer))
        if offload:
            offloader.offload()
            offloader.offload()
        addresses.append(_addresses(actor.optimizer))
        gradients.append(sum(buffer.grad_data.untyped_storage().nbytes() for buffer in offloader.gradient_buffers))
        logprobs.append(torch.cat(compute_logprobs(actor, batch)[0]))
        trainer.save(to / f"step_{number:05d}", number, with_optimizer=True)
    return {"gradients": gradients, "logprobs": torch.cat(logprobs), "addresses": addresses, "weights": trainer.dump_bytes()}


def _addresses(optimizer: Any) -> list[int]:
    """Return the data pointers of moments and separate masters."""
    addresses = []
    for part in flatten_chained(optimizer):
        addresses += [state[kind].data_ptr() for state in part.optimizer.state.values() for kind in MOMENTS]
        addresses += [master.data_ptr() for _, master in iter_masters(part)]
    return addresses


def vocabulary_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: scoring.Targets) -> dict[str, torch.Tensor]:
    """Return log-probs, entropies and gradients of an output layer whose vocabulary is split over ranks. The gradient of `hidden` is one
    term of a sum over ranks."""
    start()
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    part, hidden = (x.clone().requires_grad_() for x in (weight.chunk(ranks)[rank], hidden))
    logprobs = scoring.token_logprobs(hidden, part, targets)
    scored, entropies = scoring.score_tokens(hidden, part, targets)
    dhidden, dweight = torch.autograd.grad(logprobs.sum(), (hidden, part))
    return {"logprobs": logprobs.detach(), "scored": scored.detach(), "entropies": entropies.detach(), "hidden": dhidden, "weight": dweight}


def scored_and_whole(
    folder: Path, precision: dict[str, Any], batch: list[TrainingSample], temperature: float
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return the log-probs and gradient buffers of log-probs + 0.3 entropy of one micro-batch, from an output layer that scores a few
    rows at a time, and from whole logits of all ranks."""
    actor = Trainer(folder, precision, {"micro_batch_tokens": 10000}, temperature).actor
    (row,) = actor.make_micro_batches(batch)
    scored = ScoredPositions.from_mask(row.mask)
    targets = scored.select_targets(row, ContextShard.for_this_rank(row.lengths), temperature)

    def compute_from_whole_logits() -> tuple[torch.Tensor, ...]:
        logits = targets.scale(actor.forward(row)[0, scored.index])
        kept, every = (tree.log_softmax(gather_from_tensor_model_parallel_region(part)) for part in (targets.keep(logits), logits))
        return kept.gather(-1, targets.tokens.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)

    def compute_in_chunks() -> tuple[torch.Tensor, ...]:
        with score_positions(actor.chunks[0], scored.index, targets, with_entropy=True):
            return actor.forward(row)[0].unbind(-1)

    results = []
    for compute in (compute_in_chunks, compute_from_whole_logits):
        actor._forward_chunks[0].zero_grad_buffer()
        with mock.patch.object(scoring, "LOGITS_PER_CHUNK", 1):  # the fewest rows
            logprobs, entropies = compute()
            (logprobs + 0.3 * entropies).sum().backward()
        gradients = {name: weight.main_grad.clone() for name, weight in actor.chunks[0].named_parameters()}
        results.append((logprobs.detach(), gradients))
    return results


_FILE_BYTES = 1 << 17


def convert_run(run: Path, to: Path, full_at: str = "") -> tuple[int, int]:
    """Export in the run's precision, in small files. Return the bytes of weights that this rank read, in total and of the largest.
    Writing a file whose name begins with `full_at` fails."""
    read, read_parameter, write = [], RunWeights._read, exports.write_file

    def watch(self: RunWeights, *place: Any) -> torch.Tensor:
        tensor = read_parameter(self, *place)
        read.append(tensor.nbytes)
        return tensor

    def write_or_fail(path: Path, *rest: Any) -> dict[str, int]:
        if full_at and path.name.startswith(full_at):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *rest)

    start(Layout(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    with mock.patch.object(RunWeights, "_read", watch), mock.patch.object(exports, "write_file", write_or_fail):
        exports.convert(run, to, {}, file_bytes=_FILE_BYTES)
    return sum(read), max(read)


def largest_parameter(run: Path) -> int:
    """Return the bytes of the largest parameter of a run, in FP32."""
    model = ModelGeometry.from_hf_config(read_config(run / "hf"))
    return max(4 * shard.rows * shard.cols for shard in build_megatron_shards(model, Layout(), Coordinates()))


def scatter(samples: list[TrainingSample], layout: Layout, piece_bytes: int) -> list[TrainingSample]:
    """Return this rank's share of samples that rank 0 has, sent in pieces of `piece_bytes`."""
    start(layout)
    shares = deal(compute_costs([sample.length for sample in samples]), layout.dp) if is_rank0() else []
    with mock.patch.object(replicas, "PIECE_BYTES", piece_bytes):
        own = replicas.scatter_samples([[samples[index] for index in share] for share in shares])
    return copy.deepcopy(own)  # a tensor that goes to another process leaves its memory, where NumPy still looks for kept tokens
