"""The geometry of a model: every tensor of its Hugging Face checkpoint, and how a shard is put together from them.

All places are told in the coordinates of the Hugging Face tensor: a shard is a list of pieces, each a rectangle of one HF tensor
laid at some row and column of the shard. Trainer shards, engine shards and the checkpoint itself are all such lists, so import,
export and sync are one operation: intersect two lists (see `parallel.plan`). One-dimensional tensors count as N x 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class GeometryError(ValueError):
    """A model or a layout that cannot be cut as asked. `field`, `value`, `rule`, `fix` as in a user's error line."""

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        super().__init__(f"{field} = {value}: {rule}" + (f"; {fix}" if fix else ""))


@dataclass(frozen=True)
class Rect:
    """Rows [row, row + rows) and columns [col, col + cols) of a tensor, in elements."""

    row: int
    col: int
    rows: int
    cols: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint.

    `role` decides its precision: attention_qkv, attention_output, mlp_in, mlp_out, norm, embedding or lm_head.
    """

    name: str
    rows: int
    cols: int
    role: str
    vector: bool = False
    """One-dimensional in the checkpoint and in every shard."""


@dataclass(frozen=True)
class Piece:
    """The rectangle `source` of tensor `tensor`, laid with its first element at (`row`, `col`) of a shard."""

    tensor: Tensor
    source: Rect
    row: int = 0
    col: int = 0


@dataclass(frozen=True)
class Shard:
    """One parameter as one rank holds it. Example: q, k and v stacked in `qkv_proj.weight`, three pieces."""

    name: str
    rows: int
    cols: int
    pieces: tuple[Piece, ...]

    @property
    def filled_rows(self) -> int:
        """Rows that hold pieces; what lies below is padding."""
        return max(piece.row + piece.source.rows for piece in self.pieces)

    @property
    def role(self) -> str:
        return self.pieces[0].tensor.role

    @property
    def vector(self) -> bool:
        return self.pieces[0].tensor.vector


def whole(tensor: Tensor) -> Piece:
    """The piece that is all of a tensor."""
    return Piece(tensor, Rect(0, 0, tensor.rows, tensor.cols))


def stack(name: str, pieces: list[Piece]) -> Shard:
    """A shard of pieces with equal columns, one below the other."""
    laid, row = [], 0
    for piece in pieces:
        laid.append(Piece(piece.tensor, piece.source, row, 0))
        row += piece.source.rows
    return Shard(name, row, pieces[0].source.cols, tuple(laid))


def rows_of(tensor: Tensor, part: int, parts: int) -> Piece:
    """The `part`-th of `parts` equal runs of rows. Raises GeometryError when they do not divide."""
    size = _divide(tensor, "rows", tensor.rows, parts)
    return Piece(tensor, Rect(part * size, 0, size, tensor.cols))


def cols_of(tensor: Tensor, part: int, parts: int) -> Piece:
    """The `part`-th of `parts` equal runs of columns. Raises GeometryError when they do not divide."""
    size = _divide(tensor, "columns", tensor.cols, parts)
    return Piece(tensor, Rect(0, part * size, tensor.rows, size))


def _divide(tensor: Tensor, what: str, length: int, parts: int) -> int:
    if length % parts:
        raise GeometryError(
            "layout.tp", parts, f"must divide the {length} {what} of {tensor.name}", "choose a smaller tensor-parallel size"
        )
    return length // parts


@dataclass(frozen=True)
class ModelGeometry:
    """Widths of a decoder-only model, read from a Hugging Face config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """The output layer shares the embedding's weight."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Reads a config.json. Raises GeometryError for an architecture this project does not know, or a missing field."""
        kind = config.get("model_type")
        if kind != "qwen3":
            raise GeometryError("model_type", kind, "is not known", "use a model of one of these architectures: qwen3")
        widths = {name: _positive(config, field) for name, field in _FIELDS.items()}
        if widths["heads"] % widths["kv_heads"]:
            rule = f"must be a multiple of num_key_value_heads ({widths['kv_heads']})"
            raise GeometryError("num_attention_heads", widths["heads"], rule, "correct the model's config.json")
        return cls(**widths, tied=bool(config.get("tie_word_embeddings", False)))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint by its Hugging Face name."""
        found = [Tensor("model.embed_tokens.weight", self.vocab, self.hidden, "embedding")]
        for layer in range(self.layers):
            found += self._layer_tensors(f"model.layers.{layer}.")
        found.append(_norm("model.norm.weight", self.hidden))
        if not self.tied:
            found.append(Tensor("lm_head.weight", self.vocab, self.hidden, "lm_head"))
        return {tensor.name: tensor for tensor in found}

    def _layer_tensors(self, prefix: str) -> list[Tensor]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            _norm(prefix + "input_layernorm.weight", self.hidden),
            Tensor(prefix + "self_attn.q_proj.weight", q, self.hidden, "attention_qkv"),
            Tensor(prefix + "self_attn.k_proj.weight", kv, self.hidden, "attention_qkv"),
            Tensor(prefix + "self_attn.v_proj.weight", kv, self.hidden, "attention_qkv"),
            _norm(prefix + "self_attn.q_norm.weight", self.head_dim),
            _norm(prefix + "self_attn.k_norm.weight", self.head_dim),
            Tensor(prefix + "self_attn.o_proj.weight", self.hidden, q, "attention_output"),
            _norm(prefix + "post_attention_layernorm.weight", self.hidden),
            Tensor(prefix + "mlp.gate_proj.weight", self.ffn, self.hidden, "mlp_in"),
            Tensor(prefix + "mlp.up_proj.weight", self.ffn, self.hidden, "mlp_in"),
            Tensor(prefix + "mlp.down_proj.weight", self.hidden, self.ffn, "mlp_out"),
        ]

    def checkpoint_shards(self) -> list[Shard]:
        """The checkpoint itself as shards: every tensor whole."""
        return [Shard(tensor.name, tensor.rows, tensor.cols, (whole(tensor),)) for tensor in self.tensors().values()]


_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}


def _positive(config: Mapping[str, Any], field: str) -> int:
    if field not in config:
        raise GeometryError(field, None, "is missing from the model's config.json", "add it")
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GeometryError(field, value, "must be a positive integer", "correct the model's config.json")
    return value


def _norm(name: str, length: int) -> Tensor:
    return Tensor(name, length, 1, "norm", vector=True)
