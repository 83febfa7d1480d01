"""The engine's process: `python -m rollout_sglang.server --parent PID ...` runs SGLang's HTTP server with verified hooks, apart from the
trainer, because SGLang kills its parent process when a scheduler crashes. Importing this module installs the stub modules. Scheduler and
detokenizer import it first, because their functions are defined here."""

import argparse
import json
import multiprocessing.connection
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from megatron_rl.versions import put_programs_on_path
from megatron_rl.workers.process import die_with_parent
from megatron_rl.workers.proxies import make_bypass
from megatron_rl.workers.temporary_folder import use_private_temporary_folder
from parallel.shards import no_garbage_collection
from rollout_sglang import access, process, remote_columns
from rollout_sglang.platform import stub_modules
from rollout_sglang.serving import OPTIONS_VARIABLE, DefaultOptions

stub_modules.install()
if __name__ == "__mp_main__":  # a child that a GPU's server spawned
    stub_modules.block_megatron()

_RENDEZVOUS_SECONDS = 600.0
_NO_PARENT = 0  # parent id of an engine that a launcher started and that ends with the launcher


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Run SGLang's scheduler process. Raise RuntimeError if a hook was not applied."""
    _die_with_server()
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megatron_rl.precision.threads import lend_threads
    from rollout_sglang.hooks import registry

    registry.verify()
    if process.THREADS_VARIABLE in os.environ:
        lend_threads(int(os.environ[process.THREADS_VARIABLE]))
    return run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    _die_with_server()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*args, **kwargs)


def _die_with_server() -> None:
    """End this child when the server ends, which may have happened already. SGLang also requests this, but later and without checking."""
    server = multiprocessing.parent_process()
    assert server is not None and server.pid is not None
    die_with_parent(server.pid)


def main(arguments: list[str]) -> None:
    """Serve until a signal ends the process. `arguments`: `--parent PID` followed by SGLang's arguments."""
    for number in (signal.SIGHUP, signal.SIGUSR1):  # a cluster's warning to every process; only the trainer reacts
        signal.signal(number, signal.SIG_IGN)
    launcher = os.environ.pop(LAUNCHER_VARIABLE, "")
    if (parent := int(arguments[1])) != _NO_PARENT:
        die_with_parent(parent, signal.SIGTERM if launcher else signal.SIGKILL)
    if launcher:  # it replaces this process and ends the engine on SIGTERM
        command = [*shlex.split(launcher), sys.executable, "-m", "rollout_sglang.server", "--parent", str(_NO_PARENT), *arguments[2:]]
        os.execvp(command[0], command)
    put_programs_on_path()
    stub_modules.block_megatron()
    os.umask(0o077)
    use_private_temporary_folder()  # SGLang leaves its Unix sockets there
    with no_garbage_collection():  # which would look again and again through what the imports make, all of which stays
        from rollout_sglang import scoring
        from rollout_sglang.hooks import registry

        registry.verify()
        from sglang.srt.entrypoints.http_server import app, launch_server
        from sglang.srt.server_args import prepare_server_args

    store, meeting = _meet_ranks(arguments[2:])
    server_args = prepare_server_args([*arguments[2:], *meeting])
    os.environ |= make_bypass([server_args.host])  # SGLang calls itself
    remote_columns.add_routes(app)
    if options := os.environ.pop(OPTIONS_VARIABLE, ""):
        app.add_middleware(DefaultOptions, options=json.loads(options))
    access.require_key(app, os.environ.pop(process.API_KEY_VARIABLE))
    scoring.start(app, Path(server_args.model_path), serves=store is not None)
    launch_server(
        server_args,
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=run_detokenizer,
    )
    if store is None:
        _wait_for_schedulers()


def _meet_ranks(arguments: list[str]) -> tuple[Any, list[str]]:
    """Set up the store in which the ranks find each other. Return it, or None if another node has it, and SGLang's arguments for it."""
    from parallel.transport.process_group import find_local_address, listening_store

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # a store created by the ranks would listen on all addresses
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr", default="")
    options, _ = parser.parse_known_args(arguments)
    if not options.dist_init_addr:
        store = listening_store(options.host, _RENDEZVOUS_SECONDS)
        return store, ["--nccl-port", str(store.port)]
    # SGLang would wait for rank 0 on SIGTERM, but this process must end with its launcher, see `_wait_for_schedulers`
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    host, _, port = options.dist_init_addr.rpartition(":")
    host = host.strip("[]")
    address = os.environ["SGLANG_HOST_IP"] = find_local_address(host)  # SGLang would take the address of any interface
    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return listening_store(host, _RENDEZVOUS_SECONDS, int(port)) if options.node_rank == 0 else None, []


def _wait_for_schedulers() -> None:
    """Wait until one of this node's schedulers ends, then end this process and thereby the other schedulers."""
    multiprocessing.connection.wait([scheduler.sentinel for scheduler in multiprocessing.active_children()])
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
