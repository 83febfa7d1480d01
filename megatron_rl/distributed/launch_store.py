"""The store at which the ranks of a launch meet before their process group exists, the secret that seals it, and the process group."""

import datetime
import itertools
import os
import re
import secrets
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron_rl.config.launch import read_launch
from megatron_rl.distributed import read_outcome, to_run_error, try_call
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.node_lock import make_cache_folder
from parallel.transport.process_group import find_local_address, listening_store, runs_on_one_node, set_gloo_address
from parallel.transport.sealed_store import SealedStore, SealError

_STORE_TIMEOUT = datetime.timedelta(hours=1)  # longest time that a rank waits for rank 0's work before the process group exists

T = TypeVar("T")


def share_before_start(key: str, call: Callable[[], T], kind: Any, store: dist.Store | None = None) -> T:
    """Like `run_on_rank0`, but works before the process group exists. Raise RunError if a rank is gone.

    Check the result: a stranger who reaches the launcher's store can replace it if the store is not sealed (`open_launch_store`).

    Args:
        key: names the result; may be used once per launch.
        kind: type of the result.
        store: replaces the launcher's store, on which the process group is built later.
    """
    (rank, size, *_), error = read_launch(joins=True), None
    try:
        store = open_launch_store(_STORE_TIMEOUT) if store is None else store
        if rank == 0:
            outcome, error = try_call(call, kind)
            store.set(key, outcome.decode())  # JSON in ASCII
            store.wait([f"{key}/read/{other}" for other in range(1, size)])  # the store may end with this process
        else:
            outcome = store.get(key)
            store.set(f"{key}/read/{rank}", "")
    except (dist.DistError, SealError) as lost:
        raise to_run_error(lost) or lost from lost
    return cast(T, read_outcome(outcome, kind, error))


def open_launch_store(timeout: datetime.timedelta, is_sealed: bool = True) -> dist.Store:
    """Return the store at which the ranks of this launch meet. `timeout` limits its waits from here on.

    torchrun serves it, on every interface. Under another launcher, rank 0 does, on one interface: loopback if all ranks are on one node.
    With `is_sealed`, its values carry a seal by a secret that only this user's processes can read: `MEGATRON_RL_LAUNCH_SECRET`
    (hexadecimal), or a file in the user's cache folder if all ranks are on one node.
    """
    if not _launch:
        store = dist.PrefixStore("megatron-rl", _connect_to_launch_store(timeout))
        secret = _share_secret(store)
        _launch[:] = [store, SealedStore(store, secret) if secret else store]
    _launch[0].set_timeout(timeout)
    return _launch[is_sealed]


_SECRET_VARIABLE = "MEGATRON_RL_LAUNCH_SECRET"
_launch: list[dist.Store] = []  # the store at which the ranks of this launch meet, plain and sealed


def _share_secret(store: dist.Store) -> bytes:
    """Return the launch's secret, or b"" if the ranks share no private place."""
    if given := os.environ.pop(_SECRET_VARIABLE, ""):  # children do not need it
        if not re.fullmatch(r"(?:[0-9a-fA-F]{2}){16,}", given):
            raise UserError(_SECRET_VARIABLE, None, "must be at least 32 hexadecimal digits", "make one with openssl rand -hex 32")
        return bytes.fromhex(given)
    if not runs_on_one_node():
        return b""
    (rank, size, *_), folder = read_launch(), make_cache_folder()
    if rank == 0:
        file, secret = folder / f"{secrets.token_hex(16)}.secret", secrets.token_bytes(32)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(secret)
        try:
            store.set("secret", file.name)
            store.wait([f"secret/read/{other}" for other in range(1, size)])
        finally:
            file.unlink()
        return secret
    name = store.get("secret").decode(errors="replace")
    if not re.fullmatch(r"[0-9a-f]{32}\.secret", name) or not (folder / name).is_file():
        raise RunError("rank 0's secret is not in this user's cache folder; start all ranks of a node as one user, with one XDG_CACHE_HOME")
    secret = (folder / name).read_bytes()
    store.set(f"secret/read/{rank}", "")
    return secret


def _connect_to_launch_store(timeout: datetime.timedelta) -> dist.Store:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    rank = read_launch(joins=True).rank
    host, port = "127.0.0.1" if runs_on_one_node() else os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        if not runs_on_one_node() and ip_address(address).is_loopback:  # Debian gives a node's own name such an address
            address = "0.0.0.0"
        return listening_store(str(address), timeout.total_seconds(), port)
    except OSError as error:
        rule = f"rank 0 cannot listen there ({error.strerror})"
        raise UserError("MASTER_ADDR and MASTER_PORT", f"{host}:{port}", rule, "name an address of its node and a free port") from None


_joins = itertools.count()


def join_ranks(backend: str, timeout: datetime.timedelta) -> None:
    """Create the process group of this launch's ranks, or of this process alone without a launcher. Raise RunError, naming the remedy, if
    ranks of several nodes do not reach each other."""
    launch, store = read_launch(joins=True), cast(dist.Store, dist.HashStore())
    is_nccl, over_nodes = backend == dist.Backend.NCCL, launch.is_launched and not runs_on_one_node()
    if launch.is_launched:
        store = dist.PrefixStore(f"join {next(_joins)}", open_launch_store(timeout, is_sealed=not is_nccl))
    try:
        if over_nodes and not is_nccl:
            set_gloo_address(_find_own_address(store, launch.rank, launch.size))
        dist.init_process_group(backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.size)
    except (RuntimeError, OSError) as error:
        if not over_nodes or isinstance(error, SealError):
            raise
        reason, variable = str(error).partition("\n")[0], "NCCL_SOCKET_IFNAME" if is_nccl else "GLOO_SOCKET_IFNAME"
        fix = f"set {variable} to the interface between the nodes, and MASTER_ADDR to rank 0's address there"
        raise RunError(f"rank {launch.rank} does not reach the other ranks ({reason}); {fix}") from error


def _find_own_address(store: dist.Store, rank: int, size: int) -> str:
    """Return this node's address on the way to MASTER_ADDR. On rank 0's node, whose own name may be a loopback address there, it is the one
    on the way to another node, if there is any."""
    own = find_local_address(os.environ["MASTER_ADDR"])
    store.set(f"address {rank}", own)
    if not ip_address(own).is_loopback:
        return own
    every = (store.get(f"address {other}").decode() for other in range(size))
    return find_local_address(next((each for each in every if not ip_address(each).is_loopback), own))
