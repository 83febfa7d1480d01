"""Writes Hugging Face checkpoints: config.json, safetensors files and tokenizer. No torch at import."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.hf.checkpoint_format import find_stack
from megatron_rl.hf.files import INDEX, SINGLE, list_kept_files
from megatron_rl.precision.contract import PrecisionContract
from parallel.model_geometry import ModelGeometry

if TYPE_CHECKING:
    import torch

FILE_BYTES = 1 << 30  # largest size of a safetensors file with several tensors: a writing rank holds one file in memory


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder, and renames it to `folder` on success or removes it on error. The umask decides who
    may read it."""
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"  # mkdtemp would make it private
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def describe_weights(hf_config: Mapping[str, Any], contract: PrecisionContract, to_engine: bool = True) -> dict[str, Any]:
    """Return the config.json of the same model with weights in the formats of the contract's engine: for the engine, or for an export."""
    resolved = (ModelGeometry.describe_to_engine if to_engine else ModelGeometry.resolve_config)(hf_config)
    config = {name: value for name, value in resolved.items() if name not in ("dtype", "quantization_config")}
    model = ModelGeometry.from_hf_config(hf_config)
    quantization = contract.engine_format.quantization_config(model.unquantized_modules)
    return config | {"torch_dtype": contract.high_format.dtype} | ({"quantization_config": quantization} if quantization else {})


def write_all_but_weights(folder: Path, config: Mapping[str, Any], tokenizer_from: Path | None, field: str = "model.path") -> None:
    """Write config.json into an existing folder and copy all files but weights from `tokenizer_from`, which is all that an engine needs to
    start without weights. Raise UserError, naming `field`, if a file cannot be read or the copy has another tokenizer."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer_from is not None:
        from megatron_rl.hf.tokenizer import check_copy  # imports transformers

        for file in list_kept_files(tokenizer_from, field):
            (target := folder / file.relative_to(tokenizer_from)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        check_copy(tokenizer_from, folder, field)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokenizer_from: Path | None, file_bytes: int = FILE_BYTES
) -> None:
    """Write named tensors, config.json and tokenizer files into an existing folder."""
    from megatron_rl.hf.stacks import join_parts  # imports torch

    write_all_but_weights(folder, config, tokenizer_from)
    tensors = join_parts(tensors)
    files = cut_into_files({name: tensor.nbytes for name, tensor in tensors.items()}, file_bytes)
    numbered = ((folder / name_file(number, len(files)), names) for number, names in enumerate(files))
    write_index(folder, [write_file(path, {name: tensors[name] for name in names}) for path, names in numbered])


def cut_into_files(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> list[list[str]]:
    """Return the tensor names of each file, in the order of `sizes` (bytes by name). A file has at most `file_bytes`, or one tensor, or
    all parts of one."""
    files: list[list[str]] = [[]]
    parts: dict[str, list[str]] = {}
    for name in sizes:
        parts.setdefault((find_stack(name) or (name,))[0], []).append(name)
    total = 0
    for names in parts.values():
        size = sum(map(sizes.__getitem__, names))
        if files[-1] and total + size > file_bytes:
            files.append([])
            total = 0
        files[-1] += names
        total += size
    return files


def name_file(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write a safetensors file, which the users of its folder may read. Return the bytes of its tensors by name. Raise OSError, naming the
    file, if writing fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes its files private
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from None
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def write_index(folder: Path, files: Sequence[Mapping[str, int]]) -> None:
    """Write the index of several files, given the bytes of each file's tensors by name. A single file needs no index."""
    if len(files) > 1:
        weight_map = {name: name_file(number, len(files)) for number, sizes in enumerate(files) for name in sizes}
        index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
