"""Loads the models of a run on one rank: actor, reference, teacher, and critic."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.canary import LONGEST, make_prompts
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.actor import Actor, Critic, Policy
from megatron_rl.mcore.base.names import ModelChunks, freeze, override
from megatron_rl.mcore.model import build_model
from megatron_rl.mcore.optim.buckets import finish_gathers
from megatron_rl.mcore.weights.adapters import install_adapters, list_adapted_layers
from megatron_rl.mcore.weights.cache_scales import renew_scales
from megatron_rl.mcore.weights.load_weights import build_rank_shards, global_parameters, load_checkpoint
from megatron_rl.mcore.weights.master_spread import MasterSpread
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry, as_critic, with_trained_mtp
from parallel.row_sums import count_parts
from parallel.shards import Shard


class FrozenPolicy(Policy):
    """The reference policy of LoRA training: the same model without its adapters, so there is no second copy of the weights."""

    def compute_logprobs(self, samples: list[TrainingSample]) -> tuple[list[torch.Tensor], float]:
        finish_gathers(self.model)
        with override([layer for *_, layer in list_adapted_layers(self.model)], "adapter_enabled", False):
            return super().compute_logprobs(samples)


def load_actor(config: Config, layout: Layout, hf_config: Mapping[str, Any]) -> tuple[Actor, list[Shard]]:
    """Return the policy in training and this rank's shards of the weights that engines receive. Collective."""
    trains_mtp = config.train.mtp_loss_scaling_factor > 0
    trained = with_trained_mtp(hf_config) if trains_mtp else dict(hf_config)
    shards = build_rank_shards(trained, layout)
    model = _load(config, layout, trained, shards, config.model.folder)
    if config.lora is not None:
        install_adapters(model, config.lora, config.train.seed)
    actor = Actor(model, config.train.decay_over(config.optimizer_steps), config.rollout.temperature)
    if config.lora is None and (spread := MasterSpread.from_config(config)):
        spread.spread_optimizer(actor.optimizer, shards, global_parameters(model))
    _choose_scales(config, actor, hf_config)
    return actor, build_rank_shards(dict(hf_config), layout) if trains_mtp else shards


def load_reference(config: Config, layout: Layout, hf_config: Mapping[str, Any], actor: Actor) -> Policy | None:
    """Return the reference policy, or None without a KL term. With LoRA, it is the actor without its adapters. Collective."""
    if config.algorithm.kl_coef and config.lora is not None:
        return FrozenPolicy(actor.model, config.rollout.temperature, config.train.micro_batch_tokens)
    return _load_frozen(config, layout, hf_config, config.model.folder) if config.algorithm.kl_coef else None


def load_teacher(config: Config, layout: Layout) -> Policy | None:
    """Return the frozen teacher, or None without a [teacher] section. Collective."""
    if config.teacher is None:
        return None
    return _load_frozen(config, layout, read_config(config.teacher.path, "teacher.path"), config.teacher.path)


def describe_unread(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Return one line for each reason why the run does not read a tensor or file of its models. Reads only headers."""
    models = [(config.model.folder, "model.path", config.make_trained_geometry(hf_config))]
    if config.teacher is not None:
        models.append((path := config.teacher.path, field := "teacher.path", ModelGeometry.from_hf_config(read_config(path, field))))
    if config.algorithm.has_critic and config.critic.path is not None:
        path, field = config.critic.path, "critic.path"
        models.append((path, field, ModelGeometry.from_hf_config(as_critic(read_config(path, field)))))
    return [line for folder, field, model in models for line in HFCheckpoint(folder, {}, field).describe_unread(model)]


def _load_frozen(config: Config, layout: Layout, hf_config: Mapping[str, Any], folder: Path) -> Policy:
    model = freeze(_load(config, layout, hf_config, build_rank_shards(dict(hf_config), layout), folder))
    policy = Policy(model, config.rollout.temperature, config.train.micro_batch_tokens)
    _choose_scales(config, policy, hf_config)
    return policy


def load_critic(config: Config, layout: Layout, hf_config: Mapping[str, Any]) -> Critic | None:
    """Return the critic, or None if `algorithm.advantage` does not need one. Collective."""
    if not config.algorithm.has_critic:
        return None
    hf_config = as_critic(hf_config)
    shards = build_rank_shards(hf_config, layout)
    model = _load(config, layout, hf_config, shards, config.critic.path or config.model.folder, critic=True)
    critic = Critic(model, config.critic_train)
    if spread := MasterSpread.from_config(config):
        spread.spread_optimizer(critic.optimizer, shards, global_parameters(model))
    _choose_scales(config, critic, hf_config)
    return critic


def _load(
    config: Config, layout: Layout, hf_config: Mapping[str, Any], shards: list[Shard], folder: Path, critic: bool = False
) -> ModelChunks:
    parts, attention = count_parts(layout.tp, config.rollout.tp), config.rollout.sglang.get("attention_backend")
    contract = PrecisionContract.from_config(config.precision, parts, attention)
    model = build_model(hf_config, layout, contract, config.train)
    spread = None if config.lora is not None else MasterSpread.from_config(config)  # LoRA: frozen weights stay as in the checkpoint
    load_checkpoint(model, folder, shards, spread, critic)
    return model


def _choose_scales(config: Config, policy: Policy, hf_config: Mapping[str, Any]) -> None:
    """Choose the first scales of keys and values (`mcore.weights.cache_scales`) with a forward pass over random tokens."""
    if PrecisionContract.from_config(config.precision).scales_kv_by_layer:
        prompts = make_prompts(8, hf_config["vocab_size"], min(config.longest_sequence, LONGEST), config.train.seed)
        samples = [TrainingSample(torch.from_numpy(ids[:-1]), torch.from_numpy(ids[-1:])) for ids in prompts]
        with renew_scales(policy.model):
            policy.compute_logprobs(samples)
