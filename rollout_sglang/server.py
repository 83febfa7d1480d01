"""The engine's process: `python -m rollout_sglang.server --parent ... --host ... --port ...`, SGLang's HTTP server with our hooks verified.

SGLang ends its parent process when a scheduler crashes, so the server runs in a process of its own, never inside the trainer.
Importing this module installs the stub modules. The spawned scheduler and detokenizer import it first, because the two functions
passed to SGLang are defined here.
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
"""Parent of an engine that a launcher started, and which ends with the launcher."""


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler process. Raise RuntimeError if a hook was not applied."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megatron_rl.precision.ops.threads import lend_threads
    from rollout_sglang.hooks import registry

    registry.verify()
    if process.THREADS_VARIABLE in os.environ:
        lend_threads(int(os.environ[process.THREADS_VARIABLE]))
    return run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's detokenizer process."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*args, **kwargs)


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGKILL) -> None:
    """Let Linux send `signum` to this process when the thread that started it ends, for whatever reason, so that no engine is orphaned.

    Prefer SIGKILL, the only signal that ends a stopped process. SGLang's own child processes do the same.
    """
    ctypes.CDLL(None, use_errno=True).prctl(1, signum)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signum)


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process. `arguments`: `--parent PID` and `--host ADDRESS` first, then SGLang's other arguments."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster warns every process by it; only the trainer reacts
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")
    if (parent := int(arguments[1])) != _NO_PARENT:
        die_with_parent(parent, signal.SIGTERM if launcher else signal.SIGKILL)
    if launcher:  # it replaces this process, and ends the engine on SIGTERM
        command = [*shlex.split(launcher), sys.executable, "-m", "rollout_sglang.server", "--parent", str(_NO_PARENT), *arguments[2:]]
        os.execvp(command[0], command)
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
