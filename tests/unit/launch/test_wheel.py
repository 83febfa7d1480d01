"""`pip install .` installs the packages of this project and no other top-level names."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_wheel_has_the_programs_packages_and_nothing_else(tmp_path):
    """Built from a copy, because setuptools writes next to the sources."""
    for name in ("megatron_rl", "rollout_sglang", "parallel", "examples", "tools", "tests/unit/launch"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        tmp_path / "source",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"megatron_rl", "rollout_sglang", "parallel"}
    data = {str(path.relative_to(ROOT)) for folder in top_level for path in (ROOT / folder).rglob("*.j2")}
    assert data and data <= names, "templates are installed, too"
