"""config.json as the model families read it. A field that is missing, invalid, unsupported or unknown is refused by name."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from parallel.shards import GeometryError

Kind = TypeVar("Kind")

CORRECT = "correct the model's config.json"
_REMOVE = "remove it if it has no effect, or use another model"
MOST_LAYERS, MOST_EXPERTS, MOST_EXPERT_LAYERS = 1000, 10_000, 200_000
"""More layers, experts of a layer, and experts of all layers than any model has. Each is an object of this program."""
MOST_WIDTH, MOST_POSITIONS = 1 << 21, 1 << 31
"""More rows or columns than any weight has, and more positions than any model has. Shards and estimates of larger ones do not end."""
MOST_NUMBER = 1e15
_INTEGERS = {0: "a non-negative", 1: "a positive"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that are constants in Megatron's RotaryEmbedding. All Llama 3 models use them."""


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071). Cosines and sines are multiplied by 0.1 ln(factor) + 1, or by the ratio of that with ln(factor) multiplied
    by `mscale` and by `mscale_all_dim`, and by `attn_factor`; latent attention also corrects its softmax scale. Fields have Megatron's
    names."""

    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the pairs between which frequencies change are whole numbers
    attn_factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and at most one method of extending it to longer contexts."""

    theta: float = 10000.0
    share: float = 1.0  # share of a head's width that is rotated, starting at its first element
    interleaved: bool = False  # rotate pairs of neighbors instead of pairs from the two halves. MLA always rotates pairs of neighbors.
    llama3_factor: float | None = None
    yarn: Yarn | None = None


SAME = {"num_local_experts": "num_experts", "dtype": "torch_dtype", "rope_parameters": "rope_scaling"}
"""Name that transformers 5 writes -> older name of the same field. A file may have either, or both with equal values."""

_NAMES = """
    architectures auto_map torch_dtype dtype transformers_version quantization_config max_position_embeddings max_length bos_token_id
    eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class initializer_range use_cache attention_dropout
    hidden_dropout dropout pretraining_tp output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise ep_size
    max_window_layers output_attentions output_hidden_states return_dict is_decoder is_encoder_decoder add_cross_attention id2label label2id
    problem_type chunk_size_feed_forward _name_or_path name_or_path _commit_hash _attn_implementation attn_implementation do_sample
    temperature top_p top_k min_p num_beams repetition_penalty length_penalty typical_p num_return_sequences early_stopping
    remove_invalid_values torchscript tie_encoder_decoder unsloth_fixed unsloth_version model_max_length qk_head_dim is_llama_config
    is_qwen2_config transformers.js_config neftune_noise_alpha gradient_checkpointing use_reentrant_checkpointing model_type
    _attn_implementation_autoset min_length output_scores return_dict_in_generate num_beam_groups diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
    exponential_decay_length_penalty encoder_repetition_penalty epsilon_cutoff eta_cutoff num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind megatron_rl_critic megatron_rl_trains_mtp megatron_rl_wrapper
"""
WITHOUT_EFFECT = frozenset(_NAMES.split())
"""Fields that change nothing that trainer or engine compute: they describe files, tokens, training, or defaults of generation, or another
part of the program reads them."""


class HFConfig:
    """The fields of a config.json. Remembers which fields were read, and the defaults of those that are absent."""

    def __init__(self, fields: Mapping[str, Any], part: str = "") -> None:
        self.fields, self.part = dict(fields), part
        self.read: set[str] = set()
        self.defaults: dict[str, Any] = {}
        for name, older in SAME.items():
            new, old = self.fields.get(name), self.fields.get(older)
            if new and old and new != old:
                rule, fix = f"differs from {name} = {new}, which is another name of it", "remove one of them"
                raise GeometryError(f"config.json {older}", old, rule, fix)

    def with_defaults(self, **defaults: Any) -> "HFConfig":
        """Set a family's values for fields that are absent, and return this object."""
        for name, value in defaults.items():
            if name not in self.fields:
                self.fields[name] = self.defaults[name] = value
        return self

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return self.fields.get(name, default)

    def _find(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise GeometryError(f"config.json {self.part}{name}", None, "is missing", "add it")
        return value

    def require(self, **supported: object) -> None:
        """Raise GeometryError for a field that is present with a value other than the one that the trainer supports."""
        for name, value in supported.items():
            found = self.get(name)
            if name in self.fields and (found != value or type(found) is not type(value)):  # null is false to transformers, not absent
                raise refuse(self.part + name, found, value)

    def flag(self, name: str) -> bool:
        """Return a field that must be true, false or absent (false)."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise GeometryError(f"config.json {self.part}{name}", value, "must be true or false", CORRECT)
        return value

    def size(self, name: str, least: int = 1, most: int = MOST_WIDTH) -> int:
        """Return a field that must be an integer in a range."""
        value = self._find(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise GeometryError(f"config.json {self.part}{name}", value, f"must be {_INTEGERS[least]} integer", CORRECT)
        if value > most:
            raise GeometryError(f"config.json {self.part}{name}", value, f"must be at most {most}", CORRECT)
        return value

    def sizes(self, name: str) -> list[int]:
        """Return a field that must be a list of integers from 0, or absent (empty)."""
        values = self.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(type(each) is int and 0 <= each <= MOST_WIDTH for each in values):
            raise GeometryError(f"config.json {self.part}{name}", values, f"must be a list of integers from 0 to {MOST_WIDTH}", CORRECT)
        return values

    def number(self, name: str) -> float:
        """Return a field that must be a positive number."""
        value = self._find(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_NUMBER:
            raise GeometryError(f"config.json {self.part}{name}", value, f"must be a positive number up to {MOST_NUMBER:g}", CORRECT)
        return float(value)

    def section(self, name: str, part: str = "") -> "HFConfig | None":
        """Return a field that must be an object, as a config of its own, or None if it is absent. `part` precedes names in errors."""
        value = self.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise GeometryError(f"config.json {self.part}{name}", value, "must be an object", CORRECT)
        return HFConfig(value, part)

    def refuse_unread(self) -> set[str]:
        """Raise GeometryError for the first field that was not read and may have an effect. Return the unknown fields that have none,
        because they are null, false or empty. A number has one, even 0."""
        unknown = {name for name in self.fields if name not in self.read | WITHOUT_EFFECT and SAME.get(name) not in self.read}
        for name in (name for name in self.fields if name in unknown):
            if (value := self.fields[name]) not in (None, False, "", [], {}) or type(value) in (int, float):
                raise GeometryError(f"config.json {self.part}{name}", value, "is not known to the trainer, so it would be ignored", _REMOVE)
        return unknown

    def widths(self) -> dict[str, Any]:
        """Return the fields of `ModelGeometry` that nearly every family shares."""
        self.with_defaults(rms_norm_eps=1e-6).require(is_causal=True)
        return {
            "family": self.get("model_type"),
            "hidden": self.size("hidden_size"),
            "ffn": self.size("intermediate_size"),
            "vocab": self.size("vocab_size"),
            "tied": self.flag("tie_word_embeddings"),
            "norm_eps": self.number("rms_norm_eps"),
        }

    def layers(self) -> int:
        """Return the number of layers."""
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def in_every_layer(self, kind: Kind, name: str = "full_attention") -> tuple[Kind, ...]:
        """Return an attention for every layer. Raise GeometryError if `layer_types` names another kind than `name`."""
        layers, layer_types = self.layers(), self.get("layer_types")
        if layer_types is not None and layer_types != [name] * layers:
            raise refuse("layer_types", layer_types, f"{name} in every layer")
        return (kind,) * layers

    def head_counts(self) -> tuple[int, int]:
        """Return the numbers of query heads and of key-value heads, which divides the other."""
        heads, kv_heads = self.size("num_attention_heads"), self.size("num_key_value_heads")
        if heads % kv_heads:
            rule = f"must be a multiple of num_key_value_heads ({kv_heads})"
            raise GeometryError("config.json num_attention_heads", heads, rule, CORRECT)
        return heads, kv_heads

    def head_dim(self) -> int:
        """Return `head_dim`, which defaults to the hidden width divided by the number of heads."""
        if self.get("head_dim") is not None:
            return self.size("head_dim")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            rule = f"is missing, and hidden_size ({hidden}) is not a multiple of {heads} heads"
            raise GeometryError("config.json head_dim", None, rule, CORRECT)
        return hidden // heads

    def rope(
        self, *stretches: str, share: float = 1.0, any_share: bool = False, of_images: Collection[str] = (), latent: bool = False
    ) -> Rope:
        """Read rotary positions from `rope_parameters`, or in older files from `rope_theta` and `rope_scaling`. `stretches`: context
        extensions that the family supports ("llama3", "yarn"). `share`: the only supported share of a head that is rotated, or with
        `any_share` its default. `of_images`: fields that change nothing for text, and that an engine of text does not get. `latent`:
        whether attention is latent, whose YaRN has no options."""
        settings = self.section("rope_parameters", "rope ") or self.section("rope_scaling", "rope ") or HFConfig({}, "rope ")
        self.read |= {"rope_scaling", "rope_theta", "partial_rotary_factor"}
        theta = settings.get("rope_theta", self.get("rope_theta"))
        if theta is None:
            raise GeometryError("config.json rope_theta", theta, "is missing", "add it, or rope_parameters.rope_theta")
        if (theta := HFConfig({"rope_theta": theta}).number("rope_theta")) <= 1:  # YaRN divides by its logarithm
            raise GeometryError("config.json rope_theta", theta, "must be greater than 1", CORRECT)
        partial = settings.get("partial_rotary_factor", self.get("partial_rotary_factor", share))
        if any_share:  # of hybrid families, SGLang reads some fields in rope_parameters alone, others outside of it alone
            self.with_defaults(partial_rotary_factor=partial, rope_theta=theta).require(partial_rotary_factor=partial)
            if not settings.fields:
                whole = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial}
                self.fields["rope_parameters"] = self.defaults["rope_parameters"] = whole
            share = HFConfig(self.fields).number("partial_rotary_factor")
        if partial != share or share > 1:
            raise refuse("partial_rotary_factor", partial, min(share, 1.0))
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind == "yarn" and theta <= 1:  # YaRN divides by its logarithm
            raise GeometryError("config.json rope_theta", theta, "must be greater than 1", CORRECT)
        if kind not in ("default", *stretches):
            raise refuse("rope scaling", kind, " and ".join(("default", *stretches)))
        settings.read |= {"type", *of_images}
        for name in ("rope_parameters", "rope_scaling"):
            if self.fields.get(name) and not settings.fields.keys().isdisjoint(of_images):
                self.defaults[name] = {key: value for key, value in settings.fields.items() if key not in of_images}
        rope = Rope(
            theta,
            share,
            llama3_factor=_read_llama3(settings) if kind == "llama3" else None,
            yarn=_read_yarn(settings, latent) if kind == "yarn" else None,
        )
        if "attn_factor" in settings.defaults:
            section = "rope_parameters" if self.fields.get("rope_parameters") else "rope_scaling"
            self.defaults[section] = self.fields[section] | {"attn_factor": settings.defaults["attn_factor"]}
        settings.refuse_unread()
        return rope


def refuse(name: str, value: object, supported: object) -> GeometryError:
    what = "only models without it" if supported is None else f"only {supported}"
    return GeometryError(f"config.json {name}", value, f"is not supported by the trainer, which supports {what}", "use another model")


def _read_llama3(settings: HFConfig) -> float:
    for name, supported in _LLAMA3.items():
        if settings.get(name) != supported or isinstance(settings.get(name), bool):
            raise refuse(f"llama3 rope {name}", settings.get(name), supported)
    return settings.number("factor")


def _read_yarn(settings: HFConfig, latent: bool) -> Yarn:
    truncate = settings.with_defaults(beta_fast=32.0, beta_slow=1.0, truncate=True).flag("truncate")
    settings.require(truncate=True if latent else truncate)
    scaled = settings.get("mscale") is not None or settings.get("mscale_all_dim") is not None
    mscale, of_all = (settings.number("mscale"), settings.number("mscale_all_dim")) if scaled else (None, None)
    yarn = Yarn(
        settings.number("factor"),
        settings.size("original_max_position_embeddings", most=MOST_POSITIONS),
        beta_fast=settings.number("beta_fast"),
        beta_slow=settings.number("beta_slow"),
        truncate=truncate,
        mscale=mscale,
        mscale_all_dim=of_all,
    )
    # SGLang multiplies YaRN's own factor by attn_factor, and transformers reads attention_factor instead of both
    own, factor = _scale(yarn, mscale) / (_scale(yarn, of_all) if scaled else 1.0), settings.get("attention_factor")
    has_attn_factor = settings.get("attn_factor") is not None
    attn_factor = settings.number("attn_factor") if has_attn_factor else 1.0
    if factor is not None and not math.isclose(settings.number("attention_factor"), own * attn_factor, rel_tol=1e-6):
        if has_attn_factor or latent:
            raise refuse("rope attention_factor", factor, f"YaRN's own factor times attn_factor, {own * attn_factor:.6g}, if any")
        attn_factor = settings.defaults["attn_factor"] = settings.number("attention_factor") / own
    settings.require(attn_factor=1.0 if latent else settings.get("attn_factor"))
    return replace(yarn, attn_factor=attn_factor)


def _scale(yarn: Yarn, multiplier: float | None) -> float:
    return 0.1 * (multiplier or 1.0) * math.log(max(yarn.rotary_scaling_factor, 1.0)) + 1.0
