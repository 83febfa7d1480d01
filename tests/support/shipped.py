"""Rehearse a configuration of the project by the command that users call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def rehearse_shipped(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Return what `--json` writes of a rehearsal that must pass."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler, which a rehearsal with a CPU build of torch needs")
    command = [sys.executable, "-m", "megatron_rl", "rehearse", f"configs/{name}.toml", "--json", str(folder / "found.json"), *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found
