"""Files and folders that readers never see half made."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str, durable: bool = False) -> Path:
    """Write a hidden file beside `path` and move it there, so that a reader sees the old text or the new one; return `path`.

    Characters that UTF-8 refuses (half a surrogate pair) become "?". `durable`: on the disk when this returns.
    """
    hidden = path.with_name(f".{path.name}.tmp")
    with hidden.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(hidden, path)
    return path


def make_unique_folder(parent: Path, name: str) -> Path:
    """Make and return a folder that was not there: `name`, or `name-2`, `name-3`, ... where it is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
