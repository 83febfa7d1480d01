"""Checkpoints of models for text and images, whose config.json holds that of the decoder as `text_config`, and whose tensors are named
`model.language_model.*` and `model.visual.*`. Trainer and engine see the decoder alone: what `unwrap` returns describes it, and remembers
the rest for exports. The vision tower is not trained; checkpoints and exports keep it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from parallel.families import ALIASES, FAMILIES
from parallel.hf_config import CORRECT, HFConfig, refuse
from parallel.shards import GeometryError, HFTensor, Region, Weight

WRAPPER = "megatron_rl_wrapper"  # field of an unwrapped config.json: the wrapper's own fields
DECODER, VISION = "model.language_model.", "model.visual."  # prefixes of tensors' names
_HOISTED = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")
"""Fields that a wrapper has for the whole model."""
_VISION = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a wrapper's decoder, or `config` itself if it is none."""
    if not isinstance(text := config.get("text_config"), Mapping) or ALIASES.get(str(config.get("model_type"))) not in FAMILIES:
        return dict(config)
    own = {name: value for name, value in config.items() if name != "text_config"}
    shared = {name: own[name] for name in _HOISTED if own.get(name) is not None}
    named = {"model_type": text.get("model_type", own.get("model_type")), WRAPPER: own}
    return {name: value for name, value in text.items() if name != "architectures"} | shared | named


def rewrap(config: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a whole model whose decoder `config` describes. `source`: what `unwrap` returned for it. Rotary positions
    stay as they are there, since those of images have more fields."""
    if (own := source.get(WRAPPER)) is None:
        return dict(config)
    hoisted = {name: config[name] for name in _HOISTED if name in config}
    kept = {name: source[name] for name in ("rope_parameters", "rope_scaling") if name in source}
    text = {name: value for name, value in config.items() if name not in (*_HOISTED, "architectures")} | kept
    rest = {name: value for name, value in own.items() if name not in _HOISTED}
    return rest | hoisted | {"text_config": text | {"tie_word_embeddings": config.get("tie_word_embeddings", False)}}


def check_wrapper(config: HFConfig, family: str) -> str:
    """Return the prefix of the decoder's tensors. Raise GeometryError for settings of a wrapper that would change the decoder."""
    own = config.section(WRAPPER, "")
    if own is None:
        return "model."
    if f"{own.get('model_type')}_text" != family:
        raise GeometryError("config.json model_type", own.get("model_type"), f"has a text_config of {family}", CORRECT)
    own.read.update(("text_config", *_VISION, *_HOISTED))
    own.require(language_model_only=False)
    if own.get("tie_word_embeddings", tied := config.get("tie_word_embeddings", False)) != tied:
        raise refuse("text_config.tie_word_embeddings", tied, own.get("tie_word_embeddings"))
    own.refuse_unread()
    return DECODER


def add_prefix(weights: Iterable[Weight], prefix: str) -> Iterator[Weight]:
    """Yield weights of a decoder whose tensors have `prefix` instead of "model." in the checkpoint."""

    @cache
    def rename(tensor: HFTensor) -> HFTensor:
        return replace(tensor, name=prefix + tensor.name[6:]) if tensor.name.startswith("model.") else tensor

    def take(regions: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(region._replace(tensor=rename(region.tensor)) for region in regions)

    for weight in weights:
        yield weight._replace(pieces=take(weight.pieces), stacks=tuple(map(take, weight.stacks)))
