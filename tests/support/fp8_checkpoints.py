"""FP8 checkpoints with random blocks, made without the code under test, and large ones without data."""

import json
import struct

import torch
from safetensors.torch import save_file

from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import FP8
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors
from parallel.shards import FP32_ROLES
from support.models import edit_config, make_checkpoint, read_weights

SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def make_fp8_checkpoint(folder, scales="pow2", seed=0, **widths):
    """Write a checkpoint of `make_checkpoint` with random blocks."""
    return with_random_blocks(make_checkpoint(folder, seed, **widths), scales, seed + 1)


def with_random_blocks(folder, scales, seed):
    """Turn a checkpoint into an FP8 one: random E4M3 bytes without NaN, with random scales, "pow2" or "fp32"; the rest becomes BF16.

    Every other block has magnitudes of at most 224, so quantizing its values again would give other bytes. The first block of a weight is
    zero.
    """
    tensors = {name: tensor.bfloat16() for name, tensor in read_weights(folder).items()}
    generator = torch.Generator().manual_seed(seed)
    model = ModelGeometry.from_hf_config(read_config(folder))
    for tensor in (model.tensors() | model.list_kept()).values():
        if tensor.role in QUANTIZED_ROLES:
            tensors[tensor.name], tensors[FP8.scale_name(tensor.name)] = random_blocks(tensor.rows, tensor.cols, scales, generator)
        elif tensor.role in FP32_ROLES:
            tensors[tensor.name] = tensors[tensor.name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, {"torch_dtype": "bfloat16", "quantization_config": SETTINGS})
    return folder


def random_blocks(rows, cols, scales, generator):
    """Return float8_e4m3fn [rows, cols] and float32 scales; values are at most 0.22."""
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


def find_changed(tensors, others):
    """Return the names of `tensors` that are not in `others` byte for byte."""

    def same(a, b):
        return b is not None and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    return [name for name, tensor in tensors.items() if not same(tensor, others.get(name))]


def add_mtp_layer(folder, scales="", seed=7, layers=1):
    """Add layers for multi-token prediction to a checkpoint, as DeepSeek and GLM publish them: random BF16 numbers, or random FP8 blocks
    with `scales` for the decoder's weights. Return their tensors."""
    model = ModelGeometry.from_hf_config(read_config(folder) | {"num_nextn_predict_layers": layers})
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in list_mtp_tensors(model).items():
        if scales and tensor.role in QUANTIZED_ROLES:
            tensors[name], tensors[FP8.scale_name(name)] = random_blocks(tensor.rows, tensor.cols, scales, generator)
        else:
            value = torch.randn(tensor.shape, generator=generator) / 50
            tensors[name] = value if tensor.role in FP32_ROLES else value.bfloat16()
    save_file(read_weights(folder) | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, {"num_nextn_predict_layers": layers})
    return tensors


def split(folder, files=2):
    """Split model.safetensors into several files with an index."""
    tensors = read_weights(folder)
    names = sorted(tensors)
    weight_map = {name: f"model-{place % files:05d}.safetensors" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}


def write_sparse_safetensors(path, tensors):
    """Write a safetensors file without data. `tensors` maps names to (dtype as safetensors calls it, shape)."""
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


def list_tensors(config, dtype="F32"):
    """Return every tensor of a config.json, all with one dtype."""
    model = ModelGeometry.from_hf_config(config)
    return {name: (dtype, list(tensor.shape)) for name, tensor in (model.tensors() | model.list_kept()).items()}
