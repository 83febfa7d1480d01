"""Write Hugging Face checkpoints: config.json, safetensors, tokenizer; a folder is whole or absent. Imports without torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.hf.files import list_tokenizer_files

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


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], tokenizer_from: Path | None) -> None:
    """Write config.json and model.safetensors into an existing folder, and copy the tokenizer's files from another checkpoint."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_from is not None:
        for file in list_tokenizer_files(tokenizer_from):
            shutil.copy(file, folder / file.name)
