"""Objects that exist on rank 0 only: their results and errors reach every rank."""

import math
import os
import pickle
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from support.listening import find_listening
from support.processes import free_port

from megatron_rl.distributed import (
    Rank0,
    broadcast_from,
    errors_on_all_ranks,
    gather_errors,
    gather_from_ranks,
    launch_store,
    run_on_rank0,
)
from megatron_rl.distributed.launch_store import join_ranks, open_launch_store, share_before_start
from megatron_rl.errors import EngineLostError, MegatronRLError, RunError, UserError
from megatron_rl.observability.signals import StopError
from megatron_rl.preflight.rule import check_pinned
from parallel.transport.process_group import register_shared_gloo, runs_on_one_node


def refuse(*_: Any) -> Any:
    raise RunError(f"rank {dist.get_rank() if dist.is_initialized() else 0} refuses")


def outcome(use: Callable[[], Any]) -> Any:
    """Return the result of `use`, or its error message."""
    try:
        return use()
    except (RunError, LookupError) as error:
        return str(error) or type(error).__name__


def use_in_every_way() -> dict[str, Any]:
    dist.is_initialized() or join_ranks(register_shared_gloo(), timedelta(minutes=10))
    rank, local = dist.get_rank(), list[int]()
    held = Rank0(lambda: [rank])
    held.run_local(lambda numbers: (local.append(rank), numbers.append(7)))
    return {
        "made": outcome(lambda: Rank0(refuse)),
        "run": held.run(lambda numbers: sum(numbers), int),
        "dropped": held.run(sum),
        "error": outcome(lambda: held.run(refuse)),
        "after an error": held.run(len, int),
        "local": local,
        "local error": outcome(lambda: held.run_local(refuse)),
        "value": outcome(lambda: held.value),
        "before the start": share_before_start("made", lambda: rank, int),
        "error before the start": outcome(lambda: share_before_start("failed", refuse, int)),
        "of another": Rank0(lambda: len(held.value)).run(lambda count: count + 1, int),
    }


def test_one_process_is_rank_0():
    held = Rank0(lambda: [1])
    held.run_local(lambda numbers: numbers.append(2))
    assert held.value == [1, 2] and held.run(sum, int) == 3
    for use in (lambda: Rank0(refuse), lambda: held.run(refuse), lambda: held.run_local(refuse)):
        with pytest.raises(RunError, match="rank 0 refuses"):
            use()


def test_results_and_errors_of_rank_0_reach_every_rank(worlds):
    first, second = worlds(2).call(use_in_every_way)
    shared = {"made": "rank 0 refuses", "run": 7, "error": "rank 0 refuses", "after an error": 2, "of another": 3, "dropped": None}
    shared |= {"before the start": 0, "error before the start": "rank 0 refuses"}
    assert first == shared | {"local": [0], "local error": "rank 0 refuses", "value": [0, 7]}
    assert second == shared | {"local": [], "local error": None, "value": "list index out of range"}


class Pair(NamedTuple):
    path: Path
    numbers: dict[int, float]


VALUES: list[tuple[Any, Any]] = [
    (None, None),
    ({3: "a", -1: ""}, dict[int, str]),
    ([0.1, 1e-320, -0.0, math.inf], list[float]),
    (Pair(Path("/a b/c"), {7: 1 / 3}), Pair),
    (("x", None, True), tuple[str, int | None, bool]),
    ({"any": [1, {"deep": None}]}, Any),
    ("lines\n and \u2028 and \U0001f600", str),
]
ERRORS: list[MegatronRLError] = [
    UserError("field", "a\nb", "is wrong", "mend it"),
    UserError("field", Path("/x"), "is wrong"),
    UserError("field", [1, 2], "is wrong"),
    UserError("field", None, "is wrong"),
    UserError("field", 1.5, "is wrong"),
    RunError("broken", "line 1\nline 2"),
    EngineLostError("lost", "tail"),
    StopError("stopped by SIGTERM"),
    RunError("a name that is no text: \udcff"),
]


def describe(error: MegatronRLError | None) -> Any:
    return error and (type(error).__name__, str(error).encode(errors="backslashreplace").decode(), getattr(error, "log_tail", ""))


def exchange() -> dict[str, Any]:
    dist.is_initialized() or join_ranks(register_shared_gloo(), timedelta(minutes=10))
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def fail(error: MegatronRLError) -> Any:
        raise error

    caught = []
    for error in ERRORS:
        with pytest.raises(MegatronRLError) as raised:
            run_on_rank0(lambda error=error: fail(error))
        with pytest.raises(MegatronRLError) as again, errors_on_all_ranks():
            rank == last and fail(error)
        caught.append([describe(raised.value), describe(again.value)])
    return {
        "run": [run_on_rank0(lambda value=value: value, kind) for value, kind in VALUES],
        "gathered": [gather_from_ranks(value, kind) for value, kind in VALUES],
        "broadcast": [broadcast_from(last, value if rank == last else "not this", kind) for value, kind in VALUES],
        "ranks": gather_from_ranks(rank, int),
        "some errors": [describe(each) for each in gather_errors(RunError("here") if rank == last else None)],
        "caught": caught,
    }


def test_values_and_errors_of_every_kind_arrive_unchanged(worlds):
    for answer in worlds(2).call(exchange):
        values = [value for value, _ in VALUES]
        assert repr(answer["run"]) == repr(answer["broadcast"]) == repr(values)
        assert repr(answer["gathered"]) == repr([[value, value] for value in values]) and answer["ranks"] == [0, 1]
        assert answer["some errors"] == [None, ("RunError", "here", "")]
        assert answer["caught"] == [[describe(error)] * 2 for error in ERRORS]


@pytest.mark.parametrize("value, kind", [(1, str), ("1", int), (object(), Any), ({"a": 1}, list[int]), ([1], tuple[int, int])])
def test_a_value_of_another_type_is_refused_before_it_is_sent(value, kind):
    with pytest.raises((PydanticSerializationError, ValidationError)):
        gather_from_ranks(value, kind)


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(BOMB),)


BOMB = Path(os.environ.get("TMPDIR", "/tmp")) / f"unpickled-{os.getuid()}-{os.getppid()}"


def read_planted() -> list[str]:
    """Read what a stranger has written into the launcher's store, on every rank but 0."""
    open_store, found = open_launch_store(timedelta(minutes=10), is_sealed=False), []
    pickled = pickle.dumps(Bomb())
    planted = [pickled.hex().encode(), pickled, b"+" + pickled, b"+42", b'-["RunError"]', b'-["Bomb",["x"]]', b'-["UserError",[1]]', b""]
    for number, text in enumerate(planted):
        if int(os.environ["RANK"]):
            open_store.set(f"planted {number}", text)
            for store in (None, open_store):  # with and without a seal
                try:
                    share_before_start(f"planted {number}", lambda: Path(), Path, store)
                    found.append("read")
                except Exception as error:
                    found.append(type(error).__name__)
    return [*found, str(BOMB.exists())]


def test_what_a_stranger_writes_into_the_store_runs_no_code(worlds):
    assert pickle.loads(pickle.dumps(Bomb())) is None and BOMB.is_dir(), "the pickle works"
    BOMB.rmdir()
    _, answer = worlds(2).call(read_planted)
    assert "read" not in answer and len(answer) == 2 * 8 + 1 and answer[-1] == "False"
    assert answer[:16:2] == ["RunError"] * 8, "the seal is missing"


def find_store() -> list[str]:
    open_launch_store(timedelta(minutes=10))
    return [each.address for each in find_listening([os.getpid()]) if each.address.endswith(f":{os.environ['MASTER_PORT']}")]


def test_rank_0_serves_the_store_of_one_node_on_loopback(worlds):
    first, second = worlds(2).call(find_store)
    assert [address.rpartition(":")[0] for address in first] == ["127.0.0.1"] and second == []


A, B = "a" * 40, "b" * 40
PINNED = [
    (f"hf:o/m@{A}", "hf:o/m", True),
    (f"hf:o/m@{A}", "hf:o/m@main", True),
    (f"hf:o/m@{A}", f"hf:o/m@{A}", True),
    (f"hf:o/m@{B}", f"hf:o/m@{A}", False),
    (f"hf:o/other@{A}", "hf:o/m", False),
    ("hf:o/m@main", "hf:o/m", False),
    ("hf:o/m", "hf:o/m", False),
    ("/tmp/model", "hf:o/m", False),
    ("hf:o/m@../x", "hf:o/m", False),
    ("hf:", "hf:o/m", False),
]


@pytest.mark.parametrize("pinned, asked, is_same", PINNED)
def test_the_store_can_only_choose_a_commit_of_the_named_model(pinned, asked, is_same):
    if is_same:
        assert check_pinned(Path(pinned), Path(asked)) == Path(pinned)
    else:
        with pytest.raises(RunError, match="another program has written to it"):
            check_pinned(Path(pinned), Path(asked))


LAUNCHES = [
    ({}, True),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.5"}, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "::1"}, True),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, False),
    ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "", "MASTER_ADDR": "node1"}, False),
    ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, False),
]


def launch(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGATRON_RL_LAUNCH_SECRET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environment, is_one_node", LAUNCHES)
def test_one_node_is_recognized_by_the_launch(environment, is_one_node, monkeypatch):
    launch(monkeypatch, **environment)
    assert runs_on_one_node() == is_one_node


NODES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}


def test_a_secret_of_the_environment_seals_and_no_child_inherits_it(monkeypatch):
    launch(monkeypatch, **NODES, MEGATRON_RL_LAUNCH_SECRET="0f" * 32)
    assert launch_store._share_secret(dist.HashStore()) == b"\x0f" * 32 and "MEGATRON_RL_LAUNCH_SECRET" not in os.environ
    assert launch_store._share_secret(dist.HashStore()) == b"", "several nodes share no private place"


@pytest.mark.parametrize("secret", ["0f" * 15, "0f" * 16 + "0", "x" * 64, "secret"])
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(secret, monkeypatch):
    launch(monkeypatch, **NODES, MEGATRON_RL_LAUNCH_SECRET=secret)
    with pytest.raises(UserError, match="MEGATRON_RL_LAUNCH_SECRET: must be at least 32 hexadecimal digits") as caught:
        launch_store._share_secret(dist.HashStore())
    assert secret not in str(caught.value)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a" * 32 + ".secret", "", "x.secret", "\u00e9" * 32])
def test_a_strangers_file_is_no_secret(name, monkeypatch, tmp_path):
    launch(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", XDG_CACHE_HOME=str(tmp_path))
    store = dist.HashStore()
    store.set("secret", name)
    with pytest.raises(RunError, match="rank 0's secret is not in this user's cache folder"):
        launch_store._share_secret(store)


def test_the_secrets_file_is_private_and_goes_away(monkeypatch, tmp_path):
    launch(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", XDG_CACHE_HOME=str(tmp_path))
    store, read = dist.HashStore(), []

    def read_as_rank_1() -> None:
        path = tmp_path / "megatron-rl" / store.get("secret").decode()
        read.append((path.read_bytes(), path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777))
        store.set("secret/read/1", "")

    reader = threading.Thread(target=read_as_rank_1)
    reader.start()
    secret = launch_store._share_secret(store)
    reader.join()
    assert read == [(secret, 0o600, 0o700)] and len(secret) == 32 and not list((tmp_path / "megatron-rl").iterdir())


@pytest.mark.parametrize("host, listens_on", [("127.0.0.1", "127.0.0.1"), ("node-of-debian", "0.0.0.0")])
def test_rank_0_listens_where_other_ranks_can_reach_it_and_nowhere_else(host, listens_on, monkeypatch):
    launch(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR=host, MASTER_PORT=str(free_port()))
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args, **named: resolve(name.replace(host, "127.0.0.1"), *args, **named))
    store = launch_store._connect_to_launch_store(timedelta(seconds=5))
    own = [each.address for each in find_listening([os.getpid()]) if each.address.endswith(f":{os.environ['MASTER_PORT']}")]
    assert own == [f"{listens_on}:{os.environ['MASTER_PORT']}"] and store.num_keys() >= 0


def test_a_port_that_is_taken_is_one_line(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        launch(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(UserError, match=rf"^MASTER_ADDR and MASTER_PORT = '127.0.0.1:{port}': rank 0 cannot listen there"):
            launch_store._connect_to_launch_store(timedelta(seconds=5))
