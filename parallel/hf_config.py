"""config.json as the model families read it. A field that is missing, invalid or unsupported is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.shards import GeometryError

_CORRECT = "correct the model's config.json"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that are constants in Megatron's RotaryEmbedding. All Llama 3 models use them."""


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 uses it, with a corrected softmax scale. Fields have Megatron's names."""

    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: its base, and at most one method of extending it to longer contexts."""

    theta: float = 10000.0
    share: float = 1.0  # share of a head's width that is rotated, starting at its first element
    interleaved: bool = False  # rotate pairs of neighbors instead of pairs from the two halves. MLA always rotates pairs of neighbors.
    llama3_factor: float | None = None
    yarn: Yarn | None = None


class HFConfig:
    """The fields of a config.json. `defaults` are a family's values for absent fields."""

    def __init__(self, fields: Mapping[str, Any], **defaults: Any) -> None:
        self.fields = {**defaults, **fields}

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def require(self, **supported: object) -> None:
        """Raise GeometryError for a field that is present with a value other than the one that the trainer supports."""
        for name, value in supported.items():
            if self.get(name) not in (None, value):
                raise refuse(name, self.get(name), value)

    def size(self, name: str) -> int:
        """Return a field that must be a positive integer."""
        if name not in self.fields:
            raise GeometryError(f"config.json {name}", None, "is missing", "add it")
        value = self.fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GeometryError(f"config.json {name}", value, "must be a positive integer", _CORRECT)
        return value

    def number(self, name: str, what: str = "") -> float:
        """Return a field that must be a positive number. `what` precedes its name in error messages."""
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise GeometryError(f"config.json {what}{name}", value, "must be a positive number", _CORRECT)
        return float(value)

    def widths(self) -> dict[str, Any]:
        """Return the fields of `ModelGeometry` that nearly every family shares."""
        heads, kv_heads = self.size("num_attention_heads"), self.size("num_key_value_heads")
        if heads % kv_heads:
            rule = f"must be a multiple of num_key_value_heads ({kv_heads})"
            raise GeometryError("config.json num_attention_heads", heads, rule, _CORRECT)
        return {
            "family": self.get("model_type"),
            "layers": self.size("num_hidden_layers"),
            "hidden": self.size("hidden_size"),
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn": self.size("intermediate_size"),
            "vocab": self.size("vocab_size"),
            "tied": bool(self.get("tie_word_embeddings")),
            "norm_eps": HFConfig(self.fields, rms_norm_eps=1e-6).number("rms_norm_eps"),
        }

    def head_dim(self) -> int:
        """Return `head_dim`, which defaults to the hidden width divided by the number of heads."""
        if self.get("head_dim") is not None:
            return self.size("head_dim")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            rule = f"is missing, and hidden_size ({hidden}) is not a multiple of {heads} heads"
            raise GeometryError("config.json head_dim", None, rule, _CORRECT)
        return hidden // heads

    def rope(self, *stretches: str, share: float = 1.0) -> Rope:
        """Read rotary positions from `rope_parameters`, or in older files from `rope_theta` and `rope_scaling`. `stretches`: context
        extensions that the family supports ("llama3", "yarn"). `share`: the only supported share of a head that is rotated."""
        settings = HFConfig(self.get("rope_parameters") or self.get("rope_scaling") or {})
        theta = (self.get("rope_parameters") or {}).get("rope_theta", self.get("rope_theta"))
        if not isinstance(theta, int | float):
            raise GeometryError("config.json rope_theta", theta, "is missing", "add it, or rope_parameters.rope_theta")
        partial = settings.get("partial_rotary_factor", self.get("partial_rotary_factor", share))
        if partial != share:
            raise refuse("partial_rotary_factor", partial, share)
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind not in ("default", *stretches):
            raise refuse("rope scaling", kind, " and ".join(("default", *stretches)))
        return Rope(
            float(theta),
            share,
            llama3_factor=_read_llama3(settings) if kind == "llama3" else None,
            yarn=_read_yarn(settings) if kind == "yarn" else None,
        )


def refuse(name: str, value: object, supported: object) -> GeometryError:
    what = "only models without it" if supported is None else f"only {supported}"
    return GeometryError(f"config.json {name}", value, f"is not supported by the trainer, which supports {what}", "use another model")


def _read_llama3(settings: HFConfig) -> float:
    for name, supported in _LLAMA3.items():
        if settings.get(name) != supported:
            raise refuse(f"llama3 rope {name}", settings.get(name), supported)
    return settings.number("factor", "llama3 rope ")


def _read_yarn(settings: HFConfig) -> Yarn:
    settings.require(attention_factor=None, truncate=True)
    return Yarn(
        settings.number("factor", "yarn rope "),
        int(settings.number("original_max_position_embeddings", "yarn rope ")),
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        mscale=settings.number("mscale", "yarn rope "),  # required, because libraries disagree on the defaults
        mscale_all_dim=settings.number("mscale_all_dim", "yarn rope "),
    )
