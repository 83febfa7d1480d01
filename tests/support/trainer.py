"""A Megatron trainer on the ranks of a `World`, and what tests ask of it."""

import gc
import os
import pickle
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.config import PrecisionConfig, TrainConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.base.master_slices import flatten_chained, iter_stepped
from megatron_rl.mcore.base.names import get_model_chunks, global_name
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter
from megatron_rl.mcore.checkpoint.export import export_checkpoint
from megatron_rl.mcore.layers import spec
from megatron_rl.mcore.layers.linear.quantized_linear import (
    QuantizedColumnParallelLinear,
    QuantizedRowParallelLinear,
    list_quantized_layers,
)
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.packed_sequences import make_packed_params
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.transformer_config import QuantizedTransformerConfig
from megatron_rl.mcore.weights import step_response
from megatron_rl.mcore.weights.adapters import install_adapters, list_adapted_layers
from megatron_rl.mcore.weights.cache_scales import collect_scales, renew_scales
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, global_parameters, load_checkpoint
from megatron_rl.mcore.weights.master_spread import MasterSpread
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.training.policies import FrozenPolicy
from parallel.adapters import NAMES
from parallel.digest import make_stored_tensors, view_rect
from parallel.formats import FP8
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry, with_trained_mtp
from parallel.reshard import add_scale_transfers, reshard
from support.geometries import build_checkpoint_shards
from support.tensor_bytes import dumps


def gather_tensors(named_tensors, model, layout, format_of):
    """Gather the checkpoint's tensors, in their formats, from every rank's `collect_named_tensors`. Return them on rank 0, and an empty
    dict on other ranks. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = build_trainer_shards(model, layout, format_of=format_of)
    checkpoint_shards = build_checkpoint_shards(model)
    own = []
    for transfer in add_scale_transfers(reshard(sources, {0: checkpoint_shards}, format_of)):
        if transfer.source_rank == rank:
            own.append((transfer, view_rect(named_tensors[transfer.source], transfer.source_rect)))
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(dumps(own), gathered)
    if gathered is None:
        return {}
    tensors = make_stored_tensors(checkpoint_shards, format_of)
    for transfer, values in (pair for pairs in gathered for pair in pickle.loads(pairs)):
        view_rect(tensors[transfer.target], transfer.target_rect).copy_(values)
    return tensors


TRAIN = {"learning_rate": 1e-3, "micro_batch_tokens": 100}
STILL = {"learning_rate": 1e-12, "clip_grad": 0.0}
"""Settings of `train` whose updates compute gradients but change no weight."""


class Trainer:
    """An actor of a checkpoint on this rank. Without a layout, all ranks are tensor-parallel."""

    def __init__(self, folder, precision, train=None, temperature=1.0, layout=None, lora=None):
        if layout is None and ModelGeometry.from_hf_config(read_config(folder)).family == "gpt_oss":  # whose experts are not cut
            layout = Layout(tp=int(os.environ.get("WORLD_SIZE", "1")), etp=1)
        self.layout = start(layout)
        precision = dict(precision)
        parts = precision.pop("parts", 1)  # `parallel.row_sums.count_parts` of the trainer and an engine of another size
        self.folder, self.precision = folder, PrecisionConfig(**precision)
        self.hf_config = read_config(folder)
        self.contract = PrecisionContract.from_config(self.precision, parts)
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

    def collect_named_tensors(self):
        return collect_named_tensors(self.model, self.shards, self.contract)

    def collect_tensors(self, fp8):
        """Return the whole model by Hugging Face name on rank 0: FP32 masters, or with `fp8` what an engine gets: blocks (as uint8) or
        INT8 channels, and scales."""
        contract = self.contract if fp8 else PrecisionContract.from_config(PrecisionConfig(mode="bf16", high="fp32"))
        geometry = ModelGeometry.from_hf_config(self.hf_config)
        named_tensors, as_fp32 = collect_named_tensors(self.model, self.shards, contract), replace(contract, high="fp32")
        tensors = gather_tensors(named_tensors, geometry, self.layout, as_fp32.format_of)
        return {name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for name, tensor in tensors.items()}

    def collect_weights(self):
        return {"masters": self.collect_tensors(fp8=False), "blocks": self.collect_tensors(fp8=True)}

    def collect_masters(self):
        """Return by Hugging Face name on rank 0 what Adam steps, in float32: the parameters, or their masters in the optimizer."""
        masters = {name: master.gather(parameter.shape) for name, parameter, master in named_masters(self.actor)}
        as_fp32 = PrecisionContract.from_config(PrecisionConfig(mode="bf16", high="fp32"))
        return gather_tensors(masters, ModelGeometry.from_hf_config(self.hf_config), self.layout, as_fp32.format_of)

    def dump_bytes(self):
        """Return the raw bytes of every parameter, FP8 block and master slice of this rank."""
        masters = {f"master {name}": master.values.detach() for name, _, master in named_masters(self.actor)}
        tensors = self.collect_named_tensors() | masters
        return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}

    def save(self, to, step=1, with_optimizer=False, **state):
        """Write a run's checkpoint, by default of the weights alone."""
        state = {"step": step, "policy_version": step, "precision": self.precision.model_dump(mode="json"), **state}
        optimizer = self.actor.optimizer if with_optimizer else None
        CheckpointWriter(to, self.model, read_config(self.folder), self.folder, state, optimizer).finish()
        return to

    def differentiate(self, batch, between=lambda: None):
        """Return this replica's log-probs of a batch and the gradients of an update on it. `between` is called before the update."""
        share = own(batch)
        logprobs, _ = self.actor.compute_logprobs(batch if self.layout.dp == 1 else share)
        between()
        self.actor.update(share, negative_log_likelihood)
        gradients = {name: weight.main_grad.clone() for name, weight in self.model.named_parameters()}
        return {"logprobs": torch.cat(logprobs), "gradients": gradients}


def named_masters(actor):
    """Yield (name, parameter, master) of everything that the actor's optimizer steps."""
    names = {id(parameter): name for name, parameter in global_parameters(actor.model).items()}
    for parameter, master in (entry for part in flatten_chained(actor.optimizer) for entry in iter_stepped(part)):
        yield names[id(parameter)], parameter, master


def refuse_graph(layer, _, output):
    """Assert that a pass without gradient keeps no graph, which would hold the tensors of all layers."""
    assert torch.is_grad_enabled() or not output[0].requires_grad, f"layer {layer.layer_number}"


def start(layout=None):
    """Join the process groups and create Megatron's, again if the layout differs from the current one. Return the layout."""
    layout = layout or Layout(tp=int(os.environ.get("WORLD_SIZE", "1")))
    if not _runs(layout):
        leave_layout()
        start_megatron(layout, seed=0)
        torch.set_num_threads(1)
    return layout


def own(samples):
    """Number the samples, which every rank has, and return this replica's share."""
    return select_own([replace(sample, number=number) for number, sample in enumerate(samples)])


def gather(share, values):
    """Return the values of all replicas' samples, in order. `values` belong to the `share` that `own` returned."""
    group = parallel_state.get_data_parallel_group()
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, {sample.number: value for sample, value in zip(share, values, strict=True)}, group)
    return [value for _, value in sorted((entry for part in parts for entry in part.items()), key=lambda entry: entry[0])]


def compute_logprobs(policy, samples):
    """Compute log-probs of samples that every rank has. Return those of all replicas on every rank."""
    share = own(samples)
    logprobs, entropy = policy.compute_logprobs(share)
    return gather(share, logprobs), entropy


def leave_layout():
    """Destroy Megatron's process groups. Megatron only forgets them, but each keeps two gloo threads, and a layout has dozens."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    gc.collect()  # models hold groups, in cycles
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _runs(layout):
    if not parallel_state.is_initialized():
        return False
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = [getattr(parallel_state, f"get_{name}_parallel_group")().size() for name in names]
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return [*sizes, stages] == [layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.vpp]


def logits(folder, precision, ids):
    """Return this rank's slice of the vocabulary: float32 `[b, s, vocab / tp]`."""
    return run_model(Trainer(folder, precision).model, torch.tensor(ids)).float()


@torch.no_grad()
def run_model(model, tokens):
    """Return this rank's logits `[b, s, vocab / tp]` of sequences without padding, `[b, s]`."""
    lengths = [tokens.shape[1]] * len(tokens)
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens)).unsqueeze(0)
    row = make_packed_params(lengths, ContextShard.for_this_rank(lengths), positions)
    return model(tokens.flatten().unsqueeze(0), positions, None, packed_seq_params=row).unflatten(1, tokens.shape)[0]


def train_grpo(folder, precision, train, batches, layout=None, kl_coef=0.1):
    """Train by GRPO with a KL term on every batch. Return log-probs before and after, metrics of the steps, and the weights on rank 0. The
    response of a step is computed from all weights."""
    with mock.patch.object(step_response, "_ELEMENTS", 1 << 30):
        trainer = Trainer(folder, precision, train, layout=layout)
    loss = PolicyLoss(AlgorithmConfig(kl_coef=kl_coef))
    before, entropy = compute_logprobs(trainer.actor, batches[0])
    with renew_scales(trainer.model):
        steps = [trainer.actor.update(own(batch), loss) for batch in batches]
    after, _ = compute_logprobs(trainer.actor, batches[0])
    result = {"before": torch.cat(before), "entropy": entropy, "steps": steps, "after": torch.cat(after)}
    return {**result, "scales": collect_scales(trainer.model), **trainer.collect_weights()}


def save_checkpoint(folder, precision, batch, to, layout=None, train=None):
    """Take one step, then write a checkpoint, with the optimizer if `train` is given. Return the masters and blocks that it holds."""
    trainer = Trainer(folder, precision, train, layout=layout)
    trainer.actor.update(own(batch), negative_log_likelihood)
    trainer.save(to, with_optimizer=train is not None)
    return trainer.collect_weights()


def export(checkpoint, to, precision, alignment=None):
    """Run the command `export` in a process without process groups."""
    stop_megatron()
    export_checkpoint(checkpoint, to, precision, alignment)
    stop_megatron()
    return to


def latent_attention(absorbed):
    """Context manager in which models are built with the absorbed, or the expanded, form of latent attention."""
    return mock.patch.object(spec, "takes_absorbed_form", return_value=absorbed)


def load_model_chunks(folder, contract, layout):
    """Return this rank's virtual pipeline stages, built, loaded and quantized."""
    start(layout)
    hf_config = read_config(folder)
    chunks = get_model_chunks(build_model(hf_config, layout, contract))
    load_checkpoint(chunks, folder, build_rank_shards(hf_config, layout, dist.get_rank()))
    return chunks


def build_quantized_layer(kind, scale_format, sequence_parallel, weight, **changes):
    """Return this rank's quantized layer of a "column" (N split over ranks) or "row" (K split) kind, with its slice of `weight` `[N,
    K]`."""
    start()
    tp, rank = dist.get_world_size(), dist.get_rank()
    config = QuantizedTransformerConfig(
        num_layers=1,
        hidden_size=weight.shape[1],
        num_attention_heads=max(tp, 2),
        add_bias_linear=False,
        perform_initialization=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        linear_format=FP8.with_scales(scale_format),
    )
    options = dict(config=config, init_method=torch.nn.init.zeros_, bias=False) | {"skip_bias_add": False} | changes
    column = kind == "column"
    make = QuantizedColumnParallelLinear if column else QuantizedRowParallelLinear
    layer = make(weight.shape[1], weight.shape[0], **options, **({"gather_output": False} if column else {"input_is_parallel": True}))
    with torch.no_grad():
        layer.quantize(weight.chunk(tp, dim=0 if column else 1)[rank])
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    return layer


def train_adapters(folder, precision, lora, batches, layout=None, to=None, train=None):
    """Take a step with adapters on each batch, and write a checkpoint `to`.

    Returns the log-probs of the first batch with the frozen model, with new adapters and with trained ones; the trained adapters; and the
    names of parameters that have a gradient, have a master, or changed.
    """
    trained = Trainer(folder, precision, {"learning_rate": 1e-2, "adam_eps": 1e-4, **(train or {})}, layout=layout, lora=LoraConfig(**lora))
    actor, model = trained.actor, trained.model
    before = {name: _raw(tensor) for name, tensor in global_parameters(model).items()}
    frozen = FrozenPolicy(model, 1.0, actor.micro_batch_tokens)

    def score(policy):
        return torch.cat(compute_logprobs(policy, batches[0])[0])

    result = {"start": score(actor), "frozen": score(frozen)}
    result["steps"] = [actor.update(own(batch), negative_log_likelihood) for batch in batches]
    result |= {"trained": score(actor), "frozen again": score(frozen)}
    result["changed"] = {name for name, tensor in global_parameters(model).items() if not torch.equal(_raw(tensor), before[name])}
    result["stepped"] = {name for name, *_ in named_masters(actor)}
    result["gradients"] = {name for name, parameter in global_parameters(model).items() if hasattr(parameter, "main_grad")}
    result["masters"] = [layer for layer in list_quantized_layers(model) if layer.master is not None]
    result["adapters"] = {
        f"{global_name(chunk, name)}.{each}": getattr(layer, each).detach().clone()
        for chunk, name, layer in list_adapted_layers(model)
        for each in NAMES
    }
    if to is not None:
        trained.save(to, len(batches), with_optimizer=True, lora=lora, base=str(folder))
    return result


def _raw(tensor):
    return tensor.detach().clone().view(torch.uint8)
