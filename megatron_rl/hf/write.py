"""Write Hugging Face checkpoints: config.json, safetensors, tokenizer; a folder is whole or absent. Imports without torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.hf.files import INDEX, SINGLE, list_tokenizer_files
from megatron_rl.precision.contract import PrecisionContract

if TYPE_CHECKING:
    import torch


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends well, and vanishes when it raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)  # mkdtemp makes it private
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def describe_weights(hf_config: Mapping[str, Any], contract: PrecisionContract) -> dict[str, Any]:
    """Return the config.json of the same model with weights as the contract's engine has them."""
    config = {name: value for name, value in hf_config.items() if name not in ("dtype", "quantization_config")}
    quantization = contract.engine_format.quantization_config()
    return config | {"torch_dtype": contract.high_format.dtype} | ({"quantization_config": quantization} if quantization else {})


def write_all_but_weights(folder: Path, config: Mapping[str, Any], tokenizer_from: Path | None) -> None:
    """Write config.json into an existing folder, and copy the tokenizer's files from another checkpoint: what an engine needs to start
    without weights."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in list_tokenizer_files(tokenizer_from) if tokenizer_from else ():
        shutil.copy(file, folder / file.name)


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    tokenizer_from: Path | None,
    file_bytes: int = 5 << 30,
) -> None:
    """Write the weights into an existing folder, and what `write_all_but_weights` does.

    `tensors` by name, or pairs that are made one by one: of those no more than `file_bytes` and one tensor are in memory. More bytes than
    that are written as several files with an index.
    """
    write_all_but_weights(folder, config, tokenizer_from)
    _write_tensors(folder, tensors.items() if isinstance(tensors, Mapping) else tensors, file_bytes)


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], file_bytes: int) -> None:
    files: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    size = total = 0

    def write_part() -> None:
        from safetensors.torch import save_file

        save_file(part, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(part))
        part.clear()

    for name, tensor in tensors:
        if part and size + tensor.nbytes > file_bytes:
            write_part()
            size = 0
        part[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write_part()
    file_of = {}
    for number, names in enumerate(files):
        file = SINGLE if len(files) == 1 else f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        file_of.update(dict.fromkeys(names, file))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
