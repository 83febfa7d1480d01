"""Programs of Debian's packages, unpacked into a folder. Nothing is installed, and no package script runs."""

import shutil
import subprocess
from pathlib import Path

LIBRARIES = "usr/lib/x86_64-linux-gnu"


class NoPackageError(Exception):
    """The reason why a package is not available."""


def unpack_packages(folder: Path, *packages: str, program: str) -> Path:
    """Download packages with their missing dependencies and unpack them. Return the folder that replaces /, which has `program`. Raise
    NoPackageError on failure."""
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        raise NoPackageError("there is no apt-get here")
    archives, root = folder / "archives", folder / "root"
    (archives / "partial").mkdir(parents=True)
    options = f"Debug::NoLocking=1 Dir::Cache::archives={archives} APT::Sandbox::User= Acquire::Retries=1 Acquire::http::Timeout=20".split()
    settings = [word for option in options for word in ("-o", option)]
    command = ["apt-get", *settings, "install", "--yes", "--download-only", "--no-install-recommends"]
    try:
        done = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        raise NoPackageError("apt-get did not get it within 90 s") from None
    if done.returncode:
        raise NoPackageError(f"apt-get does not get it: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", archive, root], check=True, timeout=60)
    if not (root / program).exists():
        raise NoPackageError("it is installed already, and apt-get does not fetch it again")
    return root
