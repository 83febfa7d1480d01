"""Which of SGLang's model files an engine imports.

To find the class of one model SGLang imports the files of all, 4 s of one core at every start. It leaves out those that a variable names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"


def leave_out_other_models(architectures: Sequence[str]) -> dict[str, str]:
    """Return the environment of an engine of a model with these `architectures` (of its config.json): SGLang imports the files that define
    them or their drafts (`...NextN`, `...Eagle`), and what those import. Empty where no file does, and SGLang says so itself."""
    definitions = _find_definitions()
    needed = {file for name, files in definitions.items() if name.startswith(tuple(architectures)) for file in files}
    every = {file for files in definitions.values() for file in files}
    return {VARIABLE: ",".join(sorted(every - needed))} if needed else {}


@functools.cache
def _find_definitions() -> dict[str, list[str]]:
    """Return class -> the files of SGLang's models that define it, without importing any."""
    spec, definitions = find_spec("sglang"), dict[str, list[str]]()
    folder = Path((spec and spec.origin) or "").parent / "srt" / "models"
    for file in sorted(folder.glob("*.py")):
        for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE):
            definitions.setdefault(name, []).append(file.stem)
    return definitions
