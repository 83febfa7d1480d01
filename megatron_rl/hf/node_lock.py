"""A lock between the processes of one user on one node, in the user's own cache folder: a name in the system's temporary folder could be
held by every local user, or lead to another file."""

import hashlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_rl.errors import UserError

_VARIABLE = "XDG_CACHE_HOME"


@contextmanager
def node_lock(name: str, seconds: float, on_wait: Callable[[Path], None], refuse: Callable[[Path], Exception]) -> Iterator[None]:
    """Context manager in which no other process of this user on this node holds the lock `name`.

    Args:
        name: Any text.
        seconds: The longest wait.
        on_wait: Called once, with the lock's file, if another process holds the lock.
        refuse: Returns the error to raise after the longest wait.

    Raises:
        UserError: The cache folder belongs to another user, or it or the lock's file cannot be used.
    """
    digest = hashlib.sha256(f"{name}\n{socket.gethostname()}".encode()).hexdigest()
    path = make_cache_folder() / f"{digest[:32]}.lock"
    lock = FileLock(path, mode=0o600)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait(path)
            lock.acquire(timeout=seconds)
    except Timeout:
        raise refuse(path) from None
    except OSError as error:  # such as ENOLCK of a network file system, or ELOOP of a link
        raise _refuse(str(path), f"cannot be locked ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def make_cache_folder() -> Path:
    """Return this project's folder in the user's cache, which only the user can enter. Raise UserError if there cannot be one."""
    given = os.environ.get(_VARIABLE, "")
    try:
        parent = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # XDG's rule: a relative path is ignored
        folder = parent / "megatron-rl"
        parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        raise _refuse(given or "~/.cache", f"cannot hold the folder megatron-rl ({error})") from None
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise _refuse(str(parent), "holds a megatron-rl that is no folder of this user alone")
    return folder


def _refuse(value: str, rule: str) -> UserError:
    return UserError(_VARIABLE, value, rule, "name a folder of your own on a local disk")
