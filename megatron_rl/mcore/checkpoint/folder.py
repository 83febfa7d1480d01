"""The folder `checkpoints/` of a run: publishing, pruning, and damage checks. Does not import torch.

A checkpoint is written into a hidden folder, which is renamed to `step_00030` once everything is on disk. A killed run thus never leaves a
partial checkpoint. `state.json` is written last; its `files` hold the size and XXH3-128 hash of every other file, to detect later damage,
and under its own name those of the rest of `state.json`. Checkpoints of older versions lack this last entry.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Required

import xxhash
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from megatron_rl.config.reading import Count, check_depth, keep_valid, read_file
from megatron_rl.errors import RunError

_NAME = re.compile(r"step_(\d{5,})")
_STATE = "state.json"
_LARGEST_STATE = 1 << 30
_READERS = 8  # number of files to read concurrently


class DamagedStateError(ValueError):
    """Raised if a part of state.json has a wrong type. The message says which."""


class StateFile(TypedDict, total=False):
    """What may be read of state.json. `find_damage` checks `files`."""

    step: Required[Count]
    policy_version: Count
    optimizer_steps: Count
    critic_steps: Count
    adam_step: Count
    critic_adam_step: Count
    clip_bounds: Annotated[list[float], Field(min_length=2, max_length=2)]
    data: dict[str, Any]
    unrecorded: dict[str, float] | None
    layout: dict[str, Any]
    versions: dict[str, str]
    precision: dict[str, Any]
    lora: dict[str, Any]
    base: str


_KIND = TypeAdapter[Any](StateFile)


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
    names = os.listdir(parent) if os.path.isdir(parent) else ()
    named = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return [parent / name for _, name in sorted(named, reverse=True)]


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
    """Write state.json with its own digest; flush it and all folders to disk. Raise OSError."""
    state = json.loads(json.dumps(state))  # as it will be read
    state["files"][_STATE] = _digest(state)
    with open(folder / _STATE, "w", encoding="utf-8") as file:
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


def _digest(state: dict[str, Any]) -> dict[str, Any]:
    """Return the size and XXH3-128 hash of state.json in a canonical form, without its own entry in `files`."""
    files = {name: checksum for name, checksum in state["files"].items() if name != _STATE}
    canonical = json.dumps({**state, "files": files}, sort_keys=True).encode()
    return {"bytes": len(canonical), "xxh3_128": xxhash.xxh3_128_hexdigest(canonical)}


def has_digest(state: dict[str, Any]) -> bool:
    """Return whether state.json holds a digest of itself. Checkpoints of older versions do not."""
    return _STATE in state["files"]


def read_state_file(folder: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint. Raise one of `READ_ERRORS` if it cannot be read, and `DamagedStateError` if a part has a wrong
    type."""
    value = json.loads(read_file(folder / _STATE, _LARGEST_STATE))
    check_depth(value)
    state, problems = keep_valid(_KIND, value)
    if problems:
        raise DamagedStateError(f"has a part of a wrong type: {problems[0]:.200}")
    return dict(state)


def find_damage(folder: Path, rank: int = 0, world: int = 1) -> str:
    """Describe the damage of a checkpoint, or return "". Reads every byte of its files, or of the `rank`-th of `world` shares of the
    files."""
    try:
        state = read_state_file(folder)
        files = dict(state["files"])
        if problem := _find_damage_in_state(folder, state, files):
            return f"{_STATE} {problem}"
    except FileNotFoundError:
        return f"holds no {_STATE}"
    except DamagedStateError as error:
        return f"{_STATE} {error}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{_STATE} cannot be read ({type(error).__name__})"
    files.pop(_STATE, None)
    with ThreadPoolExecutor(_READERS) as pool:  # reading and hashing release the GIL
        problems = list(pool.map(lambda name: _find_damage_in_file(folder, name, files[name]), list(files)[rank::world]))
    return next(filter(None, problems), "")


def _find_damage_in_state(folder: Path, state: dict[str, Any], files: dict[str, Any]) -> str:
    """Compare what state.json says with its own digest, the folder, the optimizer's steps, and the data's position. Raises KeyError,
    TypeError, or ValueError if a field is missing or has another type."""
    if has_digest(state) and files[_STATE] != _digest(state):
        return "was modified after it was written"
    match = _NAME.fullmatch(folder.name)
    for version in ("step", "policy_version"):
        if match and version in state and state[version] != int(match[1]):
            return f"has {version} {state[version]!r:.40}, but the folder's name is {folder.name}"
    for steps, adam_steps in (("optimizer_steps", "adam_step"), ("critic_steps", "critic_adam_step")):
        if steps in state and adam_steps in state and state[steps] != state[adam_steps]:
            return f"has {steps} {state[steps]!r:.40}, but the optimizer took {state[adam_steps]!r:.40}"
    if data := state.get("data"):
        position, left_out = data["position"], data.get("left_out", [])
        if type(position) is not int or not all(type(each) is int and 0 <= each < position for each in left_out) or position < 0:
            return "has a position in the data that is not a number of problems, or problems after it"
    if unlisted := sorted({f"mcore/{path.name}" for path in (folder / "mcore").glob("*")} - files.keys()):
        return f"does not list {unlisted[0]}"
    if not files.keys() - {_STATE}:
        return "lists no files"
    if outside := next((name for name in files if name != os.path.normpath(name) or os.path.isabs(name) or name.startswith("..")), ""):
        return f"lists {outside!r:.80}, which is not a file of this folder"
    return ""


def _find_damage_in_file(folder: Path, name: str, expected: dict[str, Any]) -> str:
    try:
        size_and_hash = expected["bytes"], expected["xxh3_128"]
        with open(folder / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != size_and_hash[0]:
                return f"{name} has {size:,} bytes instead of {size_and_hash[0]:,}"
            if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != size_and_hash[1]:
                return f"{name} was modified after it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (KeyError, TypeError, ValueError) as error:  # ValueError: a name with a NUL, or a size that is not a number
        return f"{_STATE} has no size and hash of {name!r:.80} ({type(error).__name__})"
    return ""


def set_aside(torn: Path) -> Path:
    """Rename a damaged checkpoint so that it is neither counted nor resumed from; return its new path."""
    aside = torn.with_name(f"{torn.name}.torn")
    shutil.rmtree(aside, ignore_errors=True)
    torn.rename(aside)
    return aside
