"""Files of a Hugging Face checkpoint folder other than weights: config.json, the weights' index, the tokenizer, and everything else that a
copy of the checkpoint keeps. No torch."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from parallel.wrappers import unwrap

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TEMPLATES = "additional_chat_templates"  # the only subfolder that transformers reads
WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data", ".npz", ".npy"),
    *(".nemo", ".distcp", ".tflite", ".pb", ".pdparams", ".ot"),
)
"""Suffixes of the names of files that hold weights."""
_NOT_KEPT = (*WEIGHTS, ".index.json")
_DESCRIPTIONS = (_CONFIG, "hf_quant_config.json", "quantize_config.json", "quant_config.json", "quant_model_description.json")
"""Files that describe the weights beside them. A copy has weights in another format, which its config.json describes."""
_OTHER_FOLDERS = (_CONFIG, "adapter_config.json", "run.json", "state.json")  # mark a subfolder as another model, a run, or a checkpoint
DOCUMENTS = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".mp4")
_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST_BYTES = 128 << 20  # the largest known tokenizer file has 34 MB


def read_object(path: Path, field: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raise UserError, naming `field`, if the file is unreadable or holds anything else."""
    try:
        if (size := os.path.getsize(path)) > _MOST_BYTES:
            raise UserError(field, str(path), f"has {size:,} bytes, more than {_MOST_BYTES:,}", "the file is damaged")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read ({error.strerror})", "check the file and its permissions") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of too many digits, or nested too deeply
        raise UserError(field, str(path), f"is not valid JSON ({error})", "the file is damaged") from None
    if not isinstance(value, dict):
        raise UserError(field, str(path), "must be a JSON object", "the file is damaged")
    return value


def read_config(folder: Path, field: str = "model.path") -> dict[str, Any]:
    """Return config.json of a checkpoint folder; of a wrapper, that of its decoder (`parallel.wrappers`). Raise UserError,
    naming `field`, if it is missing or not a JSON object, or if another file describes quantized weights that it does not mention."""
    path = folder / _CONFIG
    if not os.path.isfile(path):  # Path.is_file raises OSError for a folder that cannot be entered
        rule = "holds no config.json" if os.path.isdir(folder) else "is no folder" if os.path.exists(folder) else "does not exist"
        raise UserError(field, str(folder), rule, "give a Hugging Face checkpoint folder, or hf:OWNER/NAME for a model on the hub")
    config = unwrap(read_object(path, field))
    others = [folder / name for name in _DESCRIPTIONS[1:] if not config.get("quantization_config") and os.path.isfile(folder / name)]
    if others:
        rule = "describes quantized weights that config.json does not mention, so they cannot be read"
        raise UserError(field, str(others[0]), rule, "use a BF16 checkpoint, or one with FP8 weights in blocks of 128x128")
    return config


def read_end_tokens(folder: Path, hf_config: Mapping[str, Any], field: str = "model.path") -> set[int]:
    """Return the end tokens that config.json and generation_config.json name. Raise UserError, naming `field`, for anything but ids."""
    path, found = folder / _GENERATION, set[int]()
    for file, settings in ((folder / _CONFIG, hf_config), (path, read_object(path, field) if os.path.isfile(path) else {})):
        value = settings.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise UserError(field, str(file), f"eos_token_id must be a token id or a list of ids, not {value!r:.80}", "correct the file")
        found |= set(ids)
    return found


def list_kept_files(folder: Path, field: str = "model.path") -> list[Path]:
    """Return the files that every copy of a checkpoint keeps: all but weights and what describes them, hidden files, files larger than
    128 MiB, and subfolders with another model or a run. Raise UserError, naming `field`, for a file that cannot be read."""
    kept = [file for file in _walk(folder, field) if not file.name.lower().endswith(_NOT_KEPT) and file.name not in _DESCRIPTIONS]
    for file in kept:
        if not os.path.isfile(file):
            rule = "is a link to a file that does not exist"
            raise UserError(field, str(file), rule, "complete the download, or remove the link")
        if not os.access(file, os.R_OK):
            raise UserError(field, str(file), "cannot be read (Permission denied)", "check its permissions")
    return [file for file in kept if file.stat().st_size <= _MOST_BYTES]


def refuse_pointers(folder: Path, field: str = "model.path") -> None:
    """Raise UserError, naming `field`, if a file of a checkpoint folder is the pointer that a clone without Git LFS leaves in its place."""
    for file in sorted(folder.glob("*")):
        if not file.name.startswith(".") and os.path.isfile(file) and file.stat().st_size < 1024 and os.access(file, os.R_OK):
            with file.open("rb") as stream:
                if stream.read(len(_POINTER)) == _POINTER:
                    raise UserError(field, str(file), "is a pointer of Git LFS instead of the file", "run `git lfs pull` in its folder")


def list_large_files(folder: Path, field: str = "model.path") -> list[Path]:
    """Return the files that `list_kept_files` leaves out only because of their size."""
    named = (file for file in _walk(folder, field) if not file.name.lower().endswith(_NOT_KEPT))
    return [file for file in named if os.path.isfile(file) and file.stat().st_size > _MOST_BYTES]


def _walk(folder: Path, field: str) -> Iterator[Path]:
    """Yield the regular files and the links to nothing in a folder. Linked subfolders may lead anywhere, so only chat templates are read
    from them."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(field, str(folder), f"cannot be read ({error.strerror})", "check its permissions") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if os.path.isdir(entry):
            if entry.is_symlink():
                yield from sorted(entry.glob("*.jinja")) if entry.name == _TEMPLATES else ()
            elif not any(os.path.lexists(entry / name) for name in _OTHER_FOLDERS):
                yield from _walk(entry, field)
        elif os.path.isfile(entry) or not os.path.exists(entry):  # not a pipe, socket, or device
            yield entry


def list_model_files(folder: Path) -> list[Path]:
    """Return the files that decide what a model computes: config.json, weights, and kept files other than documents."""
    kept = [file for file in list_kept_files(folder) if not file.name.lower().endswith(DOCUMENTS) and file.stem != "LICENSE"]
    weights = {*folder.glob("*.safetensors"), *(folder / name for name in read_index(folder, "model.path").values())}
    return [folder / _CONFIG, *kept, *(file for file in sorted(weights) if os.path.isfile(file))]


def read_index(folder: Path, field: str) -> dict[str, str]:
    """Return {tensor: file name}, or {} if there is no index. Raise UserError, naming `field`, for a damaged index."""
    path = folder / INDEX
    if not os.path.isfile(path):
        return {}
    try:
        index = read_object(path, field).get("weight_map")
    except UserError as error:
        raise UserError(field, str(path), f"is not a safetensors index: it {error.rule}", error.fix) from None
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise UserError(field, str(path), "is not a safetensors index", "`weight_map` must map tensor names to file names")
    for file in sorted(set(index.values())):
        if not file or "\0" in file or os.path.isabs(file) or ".." in Path(file).parts:
            raise UserError(field, str(path), f"names {file!r:.80}, which is not a file of this folder", "correct the index")
        if _leads_out(folder, file):
            fix = "copy the file into the folder"
            raise UserError(field, str(path), f"names {file!r:.80}, which is a link out of this folder", fix)
    return index


def _leads_out(folder: Path, file: str) -> bool:
    """Return whether a file of a folder is a link to another place, other than the files of the hub's cache."""
    target = Path(os.path.realpath(folder / file))
    is_cached = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    return not is_cached and not target.is_relative_to(os.path.realpath(folder))
