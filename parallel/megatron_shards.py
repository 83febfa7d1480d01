"""How Megatron-Core cuts a model: each rank's parameters as regions of the checkpoint.

linear_qkv holds, per query group g, [the q heads of g | k_g | v_g]; tensor-parallel ranks own equal runs of these rows: whole groups,
or parts of one where there are more ranks than groups. linear_fc1 is, per rank, [its rows of gate ; its rows of up]. linear_proj and
linear_fc2 split columns. Norms and routers are replicated. Experts are cut likewise, by the layout's ep and etp.

Names are those of Megatron's local modules (norms apart from the linear layers), with layers numbered over the whole model. So are
experts: `...experts.local_experts.E` has E over all experts, where Megatron itself counts from 0 on every expert-parallel rank.
`mlp.router.expert_bias` is a buffer in Megatron, everything else a parameter.
"""

from __future__ import annotations

from functools import lru_cache

from parallel.layout import Coordinates, Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import (
    GeometryError,
    HFTensor,
    Region,
    Shard,
    find_misaligned_region,
    split_cols,
    split_rows,
    split_vocabulary,
    stack_regions,
    take_all,
    take_rows,
)


def padded_vocabulary(vocab: int, tp: int, multiple: int = 1) -> int:
    """Rows of Megatron's embedding: `vocab` rounded up to a multiple of `multiple * tp`.

    `multiple` is Megatron's make_vocab_size_divisible_by. With 1 only what tensor parallelism needs is added, which is nothing for the
    vocabularies of most models; `parallel.sglang_shards.padded_vocabulary` instead makes both sides cut alike. Padding rows are no regions.
    """
    return -(-vocab // (multiple * tp)) * multiple * tp


def build_megatron_shards(
    model: ModelGeometry,
    layout: Layout,
    coordinates: Coordinates,
    *,
    quantized: bool = False,
    vocab_rows: int | None = None,
    split_latent: bool = False,
) -> list[Shard]:
    """All parameters of the rank at `coordinates`. Raises GeometryError where the layout does not divide the model.

    `quantized`: rows in the order in which the trainer must quantise them; it differs from the parameter's where that would cut
    blocks (see `compute_row_order`). `vocab_rows`: rows of the embedding over all ranks, by default `padded_vocabulary(vocab, tp)`.
    `split_latent`: MLA's down projections are cut by rows over tensor-parallel ranks, as Megatron's local ColumnParallelLinear does;
    Transformer Engine's, the default here, are replicated.
    """
    check_layout(model, layout)
    rows = padded_vocabulary(model.vocab, layout.tp) if vocab_rows is None else vocab_rows
    if rows < model.vocab or rows % layout.tp:
        raise GeometryError(
            "vocab_rows", rows, f"must be a multiple of tp ({layout.tp}) and at least the vocabulary ({model.vocab})", "pad it further"
        )
    alike = Coordinates(tp=coordinates.tp, pp=coordinates.pp, ep=coordinates.ep, etp=coordinates.etp)  # replicas share one list
    return list(_shards(model, layout, alike, quantized, rows, split_latent))


def build_trainer_shards(
    model: ModelGeometry, layout: Layout, *, quantized: bool = False, vocab_rows: int | None = None
) -> dict[int, list[Shard]]:
    """`build_megatron_shards` of every rank of a layout."""
    return {
        rank: build_megatron_shards(model, layout, layout.coordinates(rank), quantized=quantized, vocab_rows=vocab_rows)
        for rank in range(layout.world_size)
    }


def compute_row_order(model: ModelGeometry, layout: Layout, coordinates: Coordinates, name: str) -> list[int] | None:
    """The order in which parameter `name` must be quantised: row i of its blocks is row `order[i]` of the parameter.

    None where the parameter's own order is right. Otherwise the blocks are those of [q ; k ; v] of the rank: quantise
    `weight[order]`, and give back values with the inverse permutation. Raises GeometryError for a name that the rank does not hold.
    """
    kept, wanted = (
        next((shard for shard in build_megatron_shards(model, layout, coordinates, quantized=quantized) if shard.name == name), None)
        for quantized in (False, True)
    )
    if kept is None or wanted is None:
        raise GeometryError("parameter", name, "is not held by this rank", "use a name of build_megatron_shards")
    if kept.regions == wanted.regions:
        return None
    row_of = {
        (region.tensor.name, region.tensor_rect.row + offset): region.shard_row + offset
        for region in kept.regions
        for offset in range(region.tensor_rect.rows)
    }
    return [
        row_of[region.tensor.name, region.tensor_rect.row + offset]
        for region in wanted.regions
        for offset in range(region.tensor_rect.rows)
    ]


def check_layout(model: ModelGeometry, layout: Layout) -> None:
    """Raises GeometryError where a layout does not divide a model's heads, layers or experts."""
    _must_divide("tp", layout.tp, model.heads, "num_attention_heads")
    if model.latent is None and max(model.kv_heads, layout.tp) % min(model.kv_heads, layout.tp):
        rule = f"must divide num_key_value_heads ({model.kv_heads}) or be a multiple of it"
        raise GeometryError("layout.tp", layout.tp, rule, f"use a divisor of {model.kv_heads}")
    _must_divide("pp", layout.pp, model.layers, "num_hidden_layers")
    if layout.vpp > 1:
        _must_divide("vpp", layout.vpp, model.layers // layout.pp, "the layers of a pipeline stage")
    if model.experts is not None:
        _must_divide("ep", layout.ep, model.experts.count, "the number of experts")
    elif layout.ep > 1:
        raise GeometryError("layout.ep", layout.ep, f"needs a model with experts, {model.kind} has none", "set layout.ep = 1")


def _must_divide(name: str, size: int, length: int, what: str) -> None:
    if length % size:
        raise GeometryError(f"layout.{name}", size, f"must divide {what} ({length})", f"use a divisor of {length}")


@lru_cache(maxsize=1024)
def _shards(
    model: ModelGeometry, layout: Layout, coordinates: Coordinates, quantized: bool, vocab_rows: int, split_latent: bool
) -> tuple[Shard, ...]:
    rank = _MegatronShardBuilder(model, layout, coordinates, vocab_rows, split_latent)
    return tuple(reorder_for_quantization(shard) if quantized else shard for shard in rank.build())


def reorder_for_quantization(shard: Shard) -> Shard:
    """The shard as the trainer quantises it: [q ; k ; v] where the interleaved order would cut blocks, else itself. FP8 or not is the
    plan's business."""
    if not shard.name.endswith("linear_qkv.weight") or find_misaligned_region(shard) is None:
        return shard
    by_tensor = sorted(shard.regions, key=lambda region: ("qkv".index(region.tensor.name.split(".")[-2][0]), region.tensor_rect.row))
    return stack_regions(shard.name, by_tensor)


class _MegatronShardBuilder:
    """Builds the shards of one rank."""

    def __init__(self, model: ModelGeometry, layout: Layout, coordinates: Coordinates, vocab_rows: int, split_latent: bool) -> None:
        self.model, self.layout, self.coordinates = model, layout, coordinates
        self.vocab_rows, self.split_latent = vocab_rows, split_latent
        self.tensors = model.tensors()

    def build(self) -> list[Shard]:
        layout, coordinates = self.layout, self.coordinates
        first, last = coordinates.pp == 0, coordinates.pp == layout.pp - 1
        found = []
        if first:
            found.append(self._vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"))
        for layer in list_stage_layers(self.model.layers, layout, coordinates.pp):
            found += self._layer(layer)
        if last:
            found.append(stack_regions("decoder.final_layernorm.weight", [take_all(self.tensors["model.norm.weight"])]))
            if not self.model.tied:
                found.append(self._vocabulary("output_layer.weight", "lm_head.weight"))
            elif not first:  # the last stage keeps its own copy of the tied embedding
                found.append(self._vocabulary("output_layer.weight", "model.embed_tokens.weight"))
        return found

    def _vocabulary(self, name: str, hf: str) -> Shard:
        return split_vocabulary(name, self.tensors[hf], self.vocab_rows, self.coordinates.tp, self.layout.tp)

    def _layer(self, layer: int) -> list[Shard]:
        hf, mcore = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention = self._attention if self.model.latent is None else self._latent_attention
        mlp = (hf + "mlp.", mcore + "mlp.")
        return [
            self._whole(mcore + "input_layernorm.weight", hf + "input_layernorm.weight"),
            *attention(hf + "self_attn.", mcore + "self_attention."),
            self._whole(mcore + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight"),
            *(self._moe(*mlp) if self.model.has_experts(layer) else self._mlp(*mlp)),
        ]

    def _attention(self, hf: str, mcore: str) -> list[Shard]:
        found = [self._qkv(mcore + "linear_qkv.weight", [self.tensors[f"{hf}{part}_proj.weight"] for part in "qkv"])]
        if self.model.qkv_bias:
            found.append(self._qkv(mcore + "linear_qkv.bias", [self.tensors[f"{hf}{part}_proj.bias"] for part in "qkv"]))
        if self.model.qk_norm:
            found += [self._whole(f"{mcore}{part}_layernorm.weight", f"{hf}{part}_norm.weight") for part in "qk"]
        return [*found, self._cols(mcore + "linear_proj.weight", hf + "o_proj.weight")]

    def _qkv(self, name: str, qkv: list[HFTensor]) -> Shard:
        """This rank's run of rows of all groups laid one below the other."""
        model, tp = self.model, self.layout.tp
        heights = [model.heads // model.kv_heads * model.head_dim, model.head_dim, model.head_dim]  # rows of q, k, v in one group
        size = model.kv_heads * sum(heights)
        if size % tp:
            raise GeometryError(
                "layout.tp", tp, f"must divide the {size} rows of q, k and v together", f"use a divisor of {model.kv_heads}"
            )
        first, last = self.coordinates.tp * size // tp, (self.coordinates.tp + 1) * size // tp
        regions: list[Region] = []
        for group in range(first // sum(heights), -(-last // sum(heights))):
            row = group * sum(heights)
            for tensor, height in zip(qkv, heights, strict=True):
                start, end = max(first, row), min(last, row + height)
                if start < end:
                    regions.append(take_rows(tensor, group * height + start - row, end - start))
                row += height
        return stack_regions(name, regions)

    def _latent_attention(self, hf: str, mcore: str) -> list[Shard]:
        assert self.model.latent is not None
        down = self._rows if self.split_latent else self._whole
        if self.model.latent.q_rank:
            queries = [
                down(mcore + "linear_q_down_proj.weight", hf + "q_a_proj.weight"),
                self._whole(mcore + "q_layernorm.weight", hf + "q_a_layernorm.weight"),
                self._rows(mcore + "linear_q_up_proj.weight", hf + "q_b_proj.weight"),
            ]
        else:
            queries = [self._rows(mcore + "linear_q_proj.weight", hf + "q_proj.weight")]
        return [
            *queries,
            down(mcore + "linear_kv_down_proj.weight", hf + "kv_a_proj_with_mqa.weight"),
            self._whole(mcore + "kv_layernorm.weight", hf + "kv_a_layernorm.weight"),
            self._rows(mcore + "linear_kv_up_proj.weight", hf + "kv_b_proj.weight"),
            self._cols(mcore + "linear_proj.weight", hf + "o_proj.weight"),
        ]

    def _mlp(self, hf: str, mcore: str, expert: bool = False) -> list[Shard]:
        part, parts, field = (
            (self.coordinates.etp, self.layout.etp, "layout.etp") if expert else (self.coordinates.tp, self.layout.tp, "layout.tp")
        )
        gate_up = [split_rows(self.tensors[f"{hf}{half}_proj.weight"], part, parts, field) for half in ("gate", "up")]
        down = split_cols(self.tensors[hf + "down_proj.weight"], part, parts, field)
        return [stack_regions(mcore + "linear_fc1.weight", gate_up), stack_regions(mcore + "linear_fc2.weight", [down])]

    def _moe(self, hf: str, mcore: str) -> list[Shard]:
        experts = self.model.experts
        assert experts is not None
        found = [self._whole(mcore + "router.weight", hf + "gate.weight")]
        if experts.correction_bias:
            found.append(self._whole(mcore + "router.expert_bias", hf + "gate.e_score_correction_bias"))
        per_rank = experts.count // self.layout.ep
        for expert in range(self.coordinates.ep * per_rank, (self.coordinates.ep + 1) * per_rank):
            found += self._mlp(f"{hf}experts.{expert}.", f"{mcore}experts.local_experts.{expert}.", expert=True)
        if experts.shared_ffn:
            found += self._mlp(hf + "shared_experts.", mcore + "shared_experts.")
        return found

    def _whole(self, name: str, hf: str) -> Shard:
        return stack_regions(name, [take_all(self.tensors[hf])])

    def _rows(self, name: str, hf: str) -> Shard:
        return stack_regions(name, [split_rows(self.tensors[hf], self.coordinates.tp, self.layout.tp)])

    def _cols(self, name: str, hf: str) -> Shard:
        return stack_regions(name, [split_cols(self.tensors[hf], self.coordinates.tp, self.layout.tp)])


def list_stage_layers(layers: int, layout: Layout, stage: int) -> list[int]:
    """The layers of a pipeline stage, by global number: of its virtual chunk v, those of block v * pp + stage."""
    per_block = layers // (layout.pp * layout.vpp)
    starts = [(chunk * layout.pp + stage) * per_block for chunk in range(layout.vpp)]
    return [layer for start in starts for layer in range(start, start + per_block)]
