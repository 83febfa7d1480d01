"""FP8 checkpoints, quantised independently of the code under test, and large ones that hold no data."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import FP8
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import FP32_ROLES
from support.models import edit_config, make_checkpoint, read_weights

SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def make_fp8_checkpoint(folder: Path, scales: str = "pow2", seed: int = 0, **widths: Any) -> Path:
    """`with_random_blocks` of `make_checkpoint`."""
    return with_random_blocks(make_checkpoint(folder, seed, **widths), scales, seed + 1)


def with_random_blocks(folder: Path, scales: str, seed: int) -> Path:
    """Makes a checkpoint an FP8 one: random E4M3 bytes, NaN apart, with random scales, "pow2" or "fp32"; everything else becomes BF16.

    In every other block the largest magnitude is 224 or less, so that quantising its values again would give other bytes; in the first
    block of a weight all bytes are zero.
    """
    tensors = {name: tensor.bfloat16() for name, tensor in read_weights(folder).items()}
    generator = torch.Generator().manual_seed(seed)
    for tensor in ModelGeometry.from_hf_config(read_config(folder)).tensors().values():
        if tensor.role in QUANTIZED_ROLES:
            tensors[tensor.name], tensors[FP8.scale_name(tensor.name)] = random_blocks(tensor.rows, tensor.cols, scales, generator)
        elif tensor.role in FP32_ROLES:
            tensors[tensor.name] = tensors[tensor.name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, {"torch_dtype": "bfloat16", "quantization_config": SETTINGS})
    return folder


def random_blocks(rows: int, cols: int, scales: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [rows, cols] and float32 scales that make values of at most 0.22."""
    codes = torch.randint(0, 127, (rows, cols), generator=generator)  # 126 is 448, 127 NaN
    low = codes.clamp(max=118)  # 224
    grid = torch.arange(-(-rows // 128))[:, None] + torch.arange(-(-cols // 128))
    odd = (grid % 2).repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    codes = torch.where(odd == 1, low, codes)
    codes[:128, :128] = 0
    sign = torch.randint(0, 2, codes.shape, generator=generator) * 128
    scale = torch.exp2(torch.randint(-14, -11, grid.shape, generator=generator).float())
    if scales == "fp32":
        scale = scale * (1 + torch.rand(scale.shape, generator=generator))
    return (codes + sign).to(torch.uint8).view(torch.float8_e4m3fn), scale


def different(folder: Path, other: Path) -> list[str]:
    """Names of tensors that are not the same in both checkpoints: absent, of another dtype or shape, or one byte apart."""
    tensors, other_tensors = read_weights(folder), read_weights(other)

    def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        alike = a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    return sorted(name for name in tensors.keys() | other_tensors.keys() if not same(tensors.get(name), other_tensors.get(name)))


def _trainer(folder: Path, precision: dict[str, Any], layout: Layout | None) -> Any:
    from support.trainer import Trainer

    return Trainer(folder, precision, **({"layout": layout} if layout else {}))


def import_and_export(
    folder: Path, precision: dict[str, Any], to: Path, layout: Layout | None = None
) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Import a checkpoint, export it as it is. Return how many FP8 layers adopted blocks, how many there are, and rank 0's masters."""
    from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
    from megatron_rl.mcore.optim.quantizing_optimizer import requantize
    from support.gathered import save_live

    trainer = _trainer(folder, precision, layout)
    requantize(trainer.actor.optimizer)  # once more: no step was made
    save_live(to, trainer)
    layers = find_quantized_layers(trainer.model).values()
    return sum(layer.adopted for layer in layers), len(layers), trainer.collect_tensors(fp8=False)


def masters(folder: Path, precision: dict[str, Any], layout: Layout | None = None) -> dict[str, torch.Tensor]:
    """What the trainer starts from, under Hugging Face names, on rank 0: float32, whatever the parameters' dtype."""
    return _trainer(folder, precision, layout).collect_tensors(fp8=False)


def spread_masters(
    folder: Path, precision: dict[str, Any], layout: Layout | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On rank 0: what Adam steps, what the engine gets, and the parameters in BF16 as `export` writes them."""
    from support.trainer import Trainer

    trainer = Trainer(folder, {"masters": "spread", **precision}, layout=layout)
    parameters = {name: tensor.bfloat16() for name, tensor in trainer.collect_tensors(fp8=False).items()}
    return trainer.collect_masters(), trainer.collect_tensors(fp8=True), parameters


def step(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], learning_rate: float) -> dict[str, list[str]]:
    """One optimizer step. Names of FP8 layers: all, those whose blocks still are the checkpoint's, and those whose blocks are the
    quantised master."""
    from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers, reorder_rows
    from megatron_rl.precision.fp8 import quantize_weight
    from support.trainer import Trainer, negative_log_likelihood

    def same(one: Any, two: Any) -> bool:
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, two, strict=True))

    trainer = Trainer(folder, precision, {"learning_rate": learning_rate})
    layers = find_quantized_layers(trainer.model)
    first = {name: [part.clone() for part in layer.blocks] for name, layer in layers.items()}
    trainer.actor.update(batch, negative_log_likelihood)
    return {
        "all": list(layers),
        "kept": [name for name, layer in layers.items() if same(layer.blocks, first[name])],
        "quantized": [
            name
            for name, layer in layers.items()
            if same(layer.blocks, quantize_weight(reorder_rows(layer.gather_master(), layer.row_order), layer.format.scale_format))
        ],
    }


def split(folder: Path, files: int = 2) -> Path:
    """Cuts model.safetensors into several files with an index."""
    tensors = read_weights(folder)
    names = sorted(tensors)
    weight_map = {name: f"model-{place % files:05d}.safetensors" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}


def write_sparse_safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of `tensors`: name -> (dtype as safetensors calls it, shape)."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def list_tensors(config: dict[str, Any], dtype: str = "F32") -> dict[str, tuple[str, list[int]]]:
    """Every tensor of a config.json, all of one dtype."""
    tensors = ModelGeometry.from_hf_config(config).tensors().values()
    return {tensor.name: (dtype, [tensor.rows] if tensor.vector else [tensor.rows, tensor.cols]) for tensor in tensors}
