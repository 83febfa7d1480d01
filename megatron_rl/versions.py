"""Versions and programs of installed packages."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from megatron_rl.errors import UserError

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WITHOUT_DEPENDENCIES = ("megatron-core==0.19.2", "sglang==0.5.23", "xgrammar==0.2.7")
"""Packages of the CPU tier that are installed as launch/requirements-nodeps.txt says."""
_PACKAGES = ("megatron-rl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine", "math-verify")


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect the numerics of a run."""
    return {"python": platform.python_version()} | {package: version for package in _PACKAGES if (version := find_version(package))}


def find_version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_packages(command: str, *packages: str) -> None:
    """Raise UserError if a package that a command needs is not installed."""
    if missing := [package for package in packages if find_version(package) is None]:
        raise UserError(command, None, f"needs {', '.join(missing)} (not installed)", find_install_command())


def find_install_command() -> str:
    """Return the shell command that installs the CPU tier: a script of a checkout, or pip's commands for an installed wheel."""
    if (Path(__file__).parents[1] / "launch" / "setup.sh").exists():
        return "bash launch/setup.sh"
    without_dependencies = f"pip install --no-deps --ignore-requires-python {' '.join(WITHOUT_DEPENDENCIES)}"
    return f"pip install --extra-index-url {TORCH_INDEX} 'megatron-rl[cpu]' && {without_dependencies}"


def put_programs_on_path() -> None:
    """Add the interpreter's folder to PATH for this process and its children, because SGLang and FlashInfer run `ninja`."""
    folder, folders = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in folders:
        os.environ["PATH"] = os.pathsep.join([folder, *folders])
