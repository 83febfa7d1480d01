"""Files and folders that readers never see half written. Folders are only readable by their user."""

import os
from pathlib import Path


def replace_file(path: Path, text: str, durable: bool = False) -> Path:
    """Replace the text of a file atomically, so that readers see either the old or the new text, and return `path`. Characters that UTF-8
    cannot encode (half a surrogate pair) become "?". With `durable`, the text is on disk when this returns."""
    hidden = path.with_name(f".{path.name}.tmp")
    with hidden.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(hidden, path)
    return path


def make_unique_folder(parent: Path, name: str) -> Path:
    """Create and return a new folder, which only this user can enter: `name`, or `name-2`, `name-3`, ... if the name is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            number += 1
