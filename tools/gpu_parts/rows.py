"""What a part finds, row by row: appended to a file at once, so that a part that is ended at its time limit keeps what it had."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One thing that was looked at. `ok`: whether it is as it must be; None for what is only told or measured."""

    what: str
    found: str
    ok: bool | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


class Rows:
    """The file of one part, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, what: str, found: str, ok: bool | None = None, **numbers: Any) -> None:
        """Appends a row and prints it."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(Row(what, found, ok, numbers))) + "\n")
        print(f"{'FAILED: ' if ok is False else ''}{what}: {found}", flush=True)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """An exception inside becomes a failed row, with its traceback on stdout, and the part goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(what, first_line(error), ok=False)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none where it is missing. A last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            break
    return found


def first_line(error: BaseException) -> str:
    """`ValueError: no such thing`, one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:400]


def run_part(part: Callable[[Rows], None]) -> None:
    """The command line of a part's process: `--rows FILE`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True)
    part(Rows(parser.parse_args().rows))
