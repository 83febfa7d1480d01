"""Hooks on SGLang's start: forked child processes on a CPU, and the weights and adapters that are loaded."""

import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.hf.files import read_config
from parallel.adapters import ENGINE_FILE, AdapterGeometry, is_adapter
from parallel.attention.latent import LATENT_NORM_EPS
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_sglang_shards
from parallel.wrappers import DECODER, VISION
from rollout_sglang.hooks.adapters import read_settings
from rollout_sglang.rank_handler import live_tensors

NamedTensor = tuple[str, torch.Tensor]


def fork_children(original: Callable[..., Any], *args: Any) -> None:
    """Wrap `_set_envs_and_config`: fork schedulers and detokenizer from the server. A spawned interpreter imports for 6 s of a core."""
    original(*args)
    gc.freeze()  # no process needs to collect what has been imported
    multiprocessing.set_start_method("fork", force=True)


def skip_freezing(_: Any) -> None:
    """Replace `_freeze_gc_after_server_warmup`: `fork_children` froze the garbage collector, and the server may not listen yet."""


def place_load_file(instance: str) -> str:
    """Replace `shm_path_for`, whose file in /dev/shm nobody removes."""
    return str(Path(tempfile.gettempdir()) / f"load-{Path(instance).name}")


def make_up_weights(original: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wrap `initialize_dummy_weights` of an engine that starts without weights: keep the values of all tensors that no sync replaces, such
    as SGLang's scales of the KV cache, by which kernels would multiply. `kv_scales` are kept too, because they must be powers of two."""
    filled = {tensor.data_ptr() for name, tensor in live_tensors(model).items() if not name.endswith(".kv_scales")}
    kept = [(tensor, tensor.clone()) for tensor in model.state_dict().values() if tensor.data_ptr() not in filled]
    original(model, *args, **kwargs)
    for tensor, value in kept:
        tensor.copy_(value)
    for name, tensor in live_tensors(model).items():
        if name.endswith(".weight_scale_inv"):
            tensor.fill_(1)  # Blackwell's layout of scales takes only powers of two


def set_latent_epsilon(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `DeepseekV2AttentionMLA.__init__`: SGLang gives the norms of latent vectors the epsilon of all other norms."""
    original(self, *args, **named)
    for norm in (getattr(self, name, None) for name in ("q_a_layernorm", "kv_a_layernorm")):
        if norm is not None:
            norm.variance_epsilon = LATENT_NORM_EPS


def widen_decay(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap the constructors of gated delta nets: `dt_bias` is float32, as in the trainer, in a BF16 model too. A_log already is."""
    original(self, *args, **named)
    self.dt_bias.data = self.dt_bias.data.float()


_LAYER_KINDS = {"linear_attention": "linear_attention", "full_attention": "attention"}


def keep_layer_types(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `Qwen3NextConfig.__init__`, also Qwen3.5's, which drops `layer_types`: layers may be in any order, not only have full attention
    at every `full_attention_interval`-th place. SGLang's registry cannot replace a property, so its class gets another one here."""
    original(self, *args, **named)
    if (types := named.get("layer_types")) is None:
        return
    self.megatron_rl_kinds = [_LAYER_KINDS[each] for each in types]
    self.full_attention_interval = 1 + types.index("full_attention")  # code for NPUs looks for the first one
    owner: Any = next(each for each in type(self).__mro__ if "layers_block_type" in vars(each))
    by_interval = owner.layers_block_type
    if not hasattr(owner, "megatron_rl_kinds"):
        owner.megatron_rl_kinds = None
        owner.layers_block_type = property(lambda config: config.megatron_rl_kinds or by_interval.fget(config))


def keep_int8_layout(self: Any, layer: Any) -> None:
    """Replace `W8A8Int8LinearMethod.process_weights_after_loading`: transpose the weight once, not at every sync, and only on a GPU."""
    weight = layer.weight.detach()
    transposed = weight.t() if weight.is_cuda and weight.is_contiguous() else weight
    layer.weight = torch.nn.Parameter(transposed, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale.detach(), requires_grad=False)


def load_block_scales(original: Callable[..., Any], model: Any, weights: Iterable[NamedTensor]) -> Any:
    """Wrap `LlamaForCausalLM.load_weights`: load the block scales of FP8 checkpoints, which SGLang 0.5.23 looks for under another name.
    Raise KeyError for the scale of a weight that is not FP8 in the engine."""
    from sglang.srt.model_loader.auto_loader import LLAMA_STACKED_MAPPING

    scales: list[NamedTensor] = []

    def without_scales() -> Iterator[NamedTensor]:
        for name, value in weights:
            if name.endswith(".weight_scale_inv"):
                scales.append((name, value))
            else:
                yield name, value

    result = original(model, without_scales())
    parameters = dict(model.named_parameters())
    for name, value in scales:
        target = LLAMA_STACKED_MAPPING.try_load(name, value, parameters)
        if target is None:
            parameters[name].weight_loader(parameters[name], value)
        elif target not in parameters:
            raise KeyError(target)
    return result


def load_decoder(original: Callable[..., Any], model: Any, weights: Iterable[NamedTensor]) -> Any:
    """Wrap `load_weights` of Qwen3.5's decoders: in a checkpoint for text and images, load the decoder alone. SGLang would leave its
    parameters as they are and log a line for each."""
    renamed = ((name.replace(DECODER, "model.", 1), value) for name, value in weights if not name.startswith(VISION))
    return original(model, renamed)


def load_adapters(original: Callable[..., torch.nn.Module], self: Any, *, model_config: Any, **named: Any) -> torch.nn.Module:
    """Wrap `DefaultModelLoader.load_model`: load the rank's part of the adapters, for engines without a sync, as in `megatron-rl eval`."""
    from safetensors import safe_open
    from sglang.srt.runtime_context import get_parallel

    model, folder = original(self, model_config=model_config, **named), Path(model_config.model_path)
    settings, ranks = read_settings(), get_parallel()
    adapters = AdapterGeometry(settings["rank"], tuple(settings["targets"]))
    geometry = replace(ModelGeometry.from_hf_config(read_config(folder)), adapters=adapters)
    shards = build_sglang_shards(geometry, ranks.tp_group.world_size, ranks.tp_group.rank_in_group, ranks.moe_ep_group.world_size)
    live = live_tensors(model)
    with safe_open(folder / ENGINE_FILE, framework="pt") as file:
        for shard in (shard for shard in shards if is_adapter(shard.name)):
            for region in shard.regions:
                row, col, rows, cols = region.tensor_rect
                part = file.get_slice(region.tensor.name)[row : row + rows, col : col + cols]
                view_rect(live[shard.name], region.shard_rect).copy_(part)
    return model
