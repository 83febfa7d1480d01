"""A folder of its own for everything that a process and its children put into the temporary folder, such as SGLang's Unix sockets."""

import os
import subprocess
import tempfile

from megatron_rl.errors import UserError

_JANITOR = """exec 3<&0; (read -r _ <&3; rm -rf -- "$1") &"""
"""Waits for the end of a pipe. Its shell ends at once, so that it is no child of this process, with whose children it would be ended."""
_LONGEST = 81
"""Bytes of the folder that holds the new one: a Unix socket's path has 107, of which this folder and a name take 26."""

_open_ends: list[int] = []


def use_private_temporary_folder() -> None:
    """Make a folder in the temporary folder that only this user can read, and name it in TMPDIR. It is removed once this process and all
    processes forked from it have ended, even if they are killed: a shell in a session of its own waits for the end of a pipe that only they
    hold. A second call does nothing. Raise UserError if the paths of Unix sockets in it would be too long."""
    if _open_ends:
        return
    system = tempfile.gettempdir()
    if len(os.fsencode(system)) > _LONGEST:
        rule = f"must have at most {_LONGEST} bytes, because the engine has Unix sockets there"
        raise UserError("TMPDIR", system, rule, "name a folder with a shorter path")
    folder = tempfile.mkdtemp(prefix="mrl-")
    reader, writer = os.pipe()
    quiet = subprocess.DEVNULL
    subprocess.run(["sh", "-c", _JANITOR, "sh", folder], stdin=reader, stdout=quiet, stderr=quiet, start_new_session=True, check=True)
    os.close(reader)
    _open_ends.append(writer)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
