"""The engine's process: `python -m rollout_sglang.server --parent ... --host ... --port ...`, SGLang's HTTP server with our hooks verified.

SGLang ends its parent process when a scheduler crashes, so the server runs in a process of its own, never inside the trainer.
Importing this module installs the stand-ins; the spawned scheduler and detokenizer import it first, because the two functions
handed to SGLang live here.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import sys
from typing import Any

from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from rollout_sglang import process
from rollout_sglang.platform import stub_modules

stub_modules.install()

_RENDEZVOUS_SECONDS = 600.0
_NO_PARENT = 0
"""The parent of an engine that a launcher started: it ends with that."""


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler process; refuses to start half hooked."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from rollout_sglang.hooks import registry

    registry.verify()
    return run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    """SGLang's detokenizer process."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*args, **kwargs)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Asks Linux to end this process when the thread of the trainer that started it ends, however it ends, so that no engine is orphaned.

    `by` SIGKILL where it may be, as a stopped process takes no other signal. SGLang's own processes below ask for the same.
    """
    ctypes.CDLL(None, use_errno=True).prctl(1, by)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before the call
        os.kill(os.getpid(), by)


def main(arguments: list[str]) -> None:
    """Serves until it is ended. `--parent PID` and `--host ADDRESS` first, then SGLang's own other arguments."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster's warning goes to every process, and is the trainer's business
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")
    if (parent := int(arguments[1])) != _NO_PARENT:
        die_with_parent(parent, by=signal.SIGTERM if launcher else signal.SIGKILL)
    if launcher:  # takes this process's place, and ends what it started when it is asked to end
        words = [*shlex.split(launcher), sys.executable, "-m", "rollout_sglang.server", "--parent", str(_NO_PARENT), *arguments[2:]]
        os.execvp(words[0], words)
    os.umask(0o077)  # SGLang's processes talk over Unix sockets in the temporary folder
    from parallel.transport.store import listening_store
    from rollout_sglang.hooks import registry

    registry.verify()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    store = listening_store(arguments[3], _RENDEZVOUS_SECONDS)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks find each other there; a store of their own would listen everywhere
    launch_server(
        prepare_server_args([*arguments[2:], "--nccl-port", str(store.port), "--api-key", os.environ.pop(process.API_KEY_VARIABLE)]),
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=run_detokenizer,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
