"""The folder `checkpoints/` of a run: which checkpoints are whole, how many stay, and where to go on. Imports without torch.

A checkpoint is written into a hidden folder and gets its name `step_00030` in one move when everything is on the disk, so a run that is
killed leaves a whole checkpoint or none. Its `state.json`, written last, holds size and XXH3-128 of every other file; what a disk or a
copy damaged later is found by them.
"""

from __future__ import annotations

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

_NAME = re.compile(r"step_(\d{5,})")
_STATE = "state.json"
_READERS = 8
"""Files that are read at a time."""


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where a run's checkpoint of an RL step lies."""
    return run / "checkpoints" / f"step_{step:05d}"


def unfinished_folder(folder: Path) -> Path:
    """The hidden folder that a checkpoint is written in."""
    return folder.with_name(f".{folder.name}.unfinished")


def clear_unfinished(parent: Path) -> None:
    """Removes what saves and removals that were broken off left in `checkpoints/`."""
    for folder in parent.glob(".step_*"):
        shutil.rmtree(folder, ignore_errors=True)


def list_newest_first(run: Path) -> list[Path]:
    """The checkpoints of a run by name, whole or not."""
    parent = run / "checkpoints"
    named = [(int(match[1]), folder) for folder in (parent.iterdir() if parent.is_dir() else ()) if (match := _NAME.fullmatch(folder.name))]
    return [folder for _, folder in sorted(named, reverse=True)]


def checksum_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Path relative to `folder` -> size in bytes and XXH3-128 of files, each of which is on the disk afterwards. Raises OSError."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            found[name] = {"bytes": os.fstat(file.fileno()).st_size, "xxh3_128": digest}
    return found


def list_files(folder: Path) -> list[str]:
    """Every file below a folder, by its path relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes state.json and brings it and all folders to the disk. Raises OSError."""
    with open(folder / _STATE, "w") as file:
        file.write(json.dumps(state, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for part in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        fsync_folder(part)


def publish(hidden: Path, folder: Path, keep: int) -> None:
    """Gives a written checkpoint its name, then removes all but the newest `keep`; 0 keeps all. Raises OSError."""
    if folder.exists():
        _remove(folder)  # it was not whole: else the run would have gone on from it
    hidden.rename(folder)
    fsync_folder(folder.parent)
    for old in list_newest_first(folder.parent.parent)[keep:] if keep else []:
        _remove(old)


def _remove(folder: Path) -> None:
    """A removal that is broken off leaves no half checkpoint behind under its name."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def fsync_folder(folder: Path) -> None:
    """Brings a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_damage(folder: Path) -> str:
    """Why a checkpoint is not whole; "" where it is. Reads every byte of it."""
    try:
        files = json.loads((folder / _STATE).read_bytes())["files"]
    except FileNotFoundError:
        return f"holds no {_STATE}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_STATE} cannot be read ({type(error).__name__})"
    with ThreadPoolExecutor(_READERS) as pool:  # reading and hashing leave Python to others
        found = list(pool.map(lambda name: _find_damage_in_file(folder, name, files[name]), files))
    return next(filter(None, found), "")


def _find_damage_in_file(folder: Path, name: str, told: dict[str, Any]) -> str:
    try:
        with open(folder / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != told["bytes"]:
                return f"{name} has {size:,} bytes instead of {told['bytes']:,}"
            if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != told["xxh3_128"]:
                return f"{name} holds other bytes than were written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return ""


def find_newest_whole(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """(the newest whole checkpoint of a run, what is wrong with those that are newer)."""
    torn: dict[Path, str] = {}
    for folder in list_newest_first(run):
        reason = find_damage(folder)
        if not reason:
            return folder, torn
        torn[folder] = reason
    return None, torn


def set_aside(torn: Path) -> Path:
    """Renames a checkpoint that is not whole, so that it is neither counted nor taken for one; returns its new place."""
    aside = torn.with_name(f"{torn.name}.torn")
    shutil.rmtree(aside, ignore_errors=True)
    torn.rename(aside)
    return aside
