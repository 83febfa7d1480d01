"""The folder `checkpoints/` of a run: publishing, pruning, and damage checks. Does not import torch.

A checkpoint is written into a hidden folder, which is renamed to `step_00030` once everything is on disk. A killed run thus never leaves a
partial checkpoint. `state.json` is written last; it holds the size and XXH3-128 hash of every other file, to detect later damage.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.errors import RunError

_NAME = re.compile(r"step_(\d{5,})")
_STATE = "state.json"
_READERS = 8  # number of files to read concurrently


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:05d}"


def unfinished_folder(folder: Path) -> Path:
    """Return the hidden folder that a checkpoint is written into."""
    return folder.with_name(f".{folder.name}.unfinished")


def clear_unfinished(parent: Path) -> None:
    """Remove the leftovers of interrupted saves and removals in `checkpoints/`."""
    for folder in parent.glob(".step_*"):
        shutil.rmtree(folder, ignore_errors=True)


def list_newest_first(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first, including damaged ones."""
    parent = run / "checkpoints"
    named = [(int(match[1]), folder) for folder in (parent.iterdir() if parent.is_dir() else ()) if (match := _NAME.fullmatch(folder.name))]
    return [folder for _, folder in sorted(named, reverse=True)]


def checksum_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return {relative path: size in bytes and XXH3-128} after flushing each file to disk. Raise OSError."""
    checksums = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            checksums[name] = {"bytes": os.fstat(file.fileno()).st_size, "xxh3_128": digest}
    return checksums


def check_room(folder: Path, needed: int) -> None:
    """Raise RunError if the disk of `folder` has fewer than `needed` free bytes."""
    if (free := shutil.disk_usage(folder).free) < needed:
        raise RunError(f"{needed / 2**20:,.0f} MiB are needed, but only {free / 2**20:,.0f} MiB are free on the disk ({folder.parent})")


def list_files(folder: Path) -> list[str]:
    """Return the relative path of every file below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json; flush it and all folders to disk. Raise OSError."""
    with open(folder / _STATE, "w") as file:
        file.write(json.dumps(state, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for part in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        fsync_folder(part)


def publish(hidden: Path, folder: Path, keep: int) -> None:
    """Rename a written checkpoint to its final name, then remove all but the newest `keep` checkpoints; 0 keeps all. Raise OSError."""
    if folder.exists():
        _remove(folder)  # the run did not resume from it, so it is damaged
    hidden.rename(folder)
    fsync_folder(folder.parent)
    for old in list_newest_first(folder.parent.parent)[keep:] if keep else []:
        _remove(old)


def _remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal leaves no damaged checkpoint."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def fsync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_damage(folder: Path, rank: int = 0, world: int = 1) -> str:
    """Describe the damage of a checkpoint, or return "". Reads every byte of its files, or of the `rank`-th of `world` shares of the
    files."""
    try:
        files = json.loads((folder / _STATE).read_bytes())["files"]
    except FileNotFoundError:
        return f"holds no {_STATE}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_STATE} cannot be read ({type(error).__name__})"
    with ThreadPoolExecutor(_READERS) as pool:  # reading and hashing release the GIL
        problems = list(pool.map(lambda name: _find_damage_in_file(folder, name, files[name]), list(files)[rank::world]))
    return next(filter(None, problems), "")


def _find_damage_in_file(folder: Path, name: str, expected: dict[str, Any]) -> str:
    try:
        with open(folder / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
            if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != expected["xxh3_128"]:
                return f"{name} was modified after it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def set_aside(torn: Path) -> Path:
    """Rename a damaged checkpoint so that it is neither counted nor resumed from; return its new path."""
    aside = torn.with_name(f"{torn.name}.torn")
    shutil.rmtree(aside, ignore_errors=True)
    torn.rename(aside)
    return aside
