"""Columns that stay at the engine's server: what rank 0 learns of them, when they are dropped, and how a replica fetches them over HTTP."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from support.processes import free_port, until

from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape
from rollout_sglang import remote_columns
from rollout_sglang.access import require_key
from rollout_sglang.answers import pack_answers, read_answers, read_generation
from rollout_sglang.remote_columns import ColumnStore, ask_to_leave, choose_place, fetch_columns, read_place

KEY = "0123456789abcdef"
SHAPE = RoutingShape(2, (0, 1), 4, 1)


def answer(tokens=3, version=1, versions=(), kept=False, experts=False, logprob=-0.5):
    """Return SGLang's answer to a prompt of two tokens."""
    meta = {"finish_reason": {"type": "stop"}, "weight_version": str(version), "cached_tokens": 2}
    meta["weight_versions"] = [{"version": str(each), "start": start, "end": start + 1} for start, each in enumerate(versions)]
    meta["output_token_logprobs"] = [(logprob - number, 10 + number, None) for number in range(tokens)]
    if kept:
        meta["output_token_sampling_mask"] = [[10 + number, 9] for number in range(tokens)]
        meta["output_token_sampling_logprobs"] = [-0.25] * tokens
    (packed,) = read_answers(pack_answers([{"meta_info": meta}]))
    if experts:
        packed.experts, packed.experts_dtype = bytearray(np.arange(2 * (tokens + 1), dtype=np.uint8) % 4), "|u1"
    return packed


def leave(store, packed, place="remote", staleness=0, url="http://engine"):
    """Return the completion that rank 0 gets."""
    return read_generation(store.leave([7, 8], packed, place, staleness), 2, SHAPE, True, True, url, KEY)


@pytest.fixture
def server(monkeypatch):
    """The address of a server with an empty store of its own."""
    monkeypatch.setattr(remote_columns, "store", ColumnStore())
    monkeypatch.setattr(remote_columns, "_WAIT_SECONDS", 0.0)
    app, port = Starlette(), free_port()
    remote_columns.add_routes(app)
    require_key(app, KEY)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started, 60, "the server")
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize("kept", [False, True])
def test_rank_0_learns_only_what_it_needs(kept):
    packed = answer(version=4, versions=(3, 4, 4), kept=kept)
    whole = read_generation(packed, 2, None, kept, True)
    left = leave(ColumnStore(), packed)
    remote = left.remote
    assert (remote.url, remote.key, remote.tokens, remote.versions, remote.trained_at) == ("http://engine", KEY, 3, (3, 4), None)
    assert (remote.prompt_tokens, remote.has_text, left.text) == (2, True, "")
    assert remote.logprob_sum == float(np.sum(whole.logprobs_T)) and KEY not in repr(left)
    assert not len(left.output_ids_T) and not len(left.logprobs_T) and left.routed_experts_T is left.kept_tokens is left.versions_T is None
    assert (left.policy_version, left.finish_reason, left.cached_tokens) == (4, "stop", 2)
    other = leave(ColumnStore(), answer(version=4))
    assert other.remote.digest == remote.digest != leave(ColumnStore(), answer(2)).remote.digest and other.remote.handle != remote.handle


def test_the_text_may_come_with_the_answer_and_an_aborted_completion_stays_whole():
    store, told = ColumnStore(), answer()
    told.text = "twelve"
    left = leave(store, told, "but_text")
    assert left.text == "twelve" and not left.remote.has_text and not len(left.output_ids_T)
    assert store.leave([7], packed := answer(), "here", 0) is packed
    (aborted,) = read_answers(pack_answers([{"meta_info": {"finish_reason": {"type": "abort"}}}]))
    assert store.leave([7], aborted, "remote", 0) is aborted
    with pytest.raises(RunError, match="not a finite number"):
        leave(store, answer(logprob=float("nan")))


@pytest.mark.parametrize("staleness", [0, 2])
def test_columns_live_as_long_as_a_trainer_may_take_them(staleness):
    store = ColumnStore()
    handles = [leave(store, answer(version=version), "remote", staleness).remote.handle for version in range(9, 13)]
    assert [kept is not None for kept in store.get(handles)] == [version + staleness >= 12 for version in range(9, 13)]


def test_headers_say_where_columns_go():
    assert read_place({}) == ("here", 0) and ask_to_leave("here", 3) == {}
    assert read_place(ask_to_leave("but_text", 3)) == ("but_text", 3)


def test_a_replica_fetches_columns_in_order_from_every_engine(server):
    packed = [answer(3 + number, 5, kept=True, experts=True) for number in range(3)]
    whole = [read_generation(each, 2, SHAPE, True, True) for each in packed]
    columns = [leave(remote_columns.store, each, url=server).remote for each in packed]
    columns[1] = replace(columns[1], url=server.replace("127.0.0.1", "localhost"))
    for found, expected in zip(fetch_columns(columns, True, SHAPE, 60.0), whole, strict=True):
        assert found.remote is None and found.policy_version == 5 and found.prompt_ids_T.tolist() == [7, 8]
        for name in ("output_ids_T", "logprobs_T", "routed_experts_T"):
            one, other = getattr(found, name), getattr(expected, name)
            assert np.array_equal(one, other) and one.dtype == other.dtype
        assert found.kept_tokens.ids.tolist() == expected.kept_tokens.ids.tolist()
    assert fetch_columns([], True, SHAPE, 60.0) == []


def test_lost_columns_end_the_run_with_one_line_that_hides_the_key(server):
    kept = leave(remote_columns.store, answer(kept=True, experts=True), url=server).remote
    wrong = {
        "no longer has the tokens of a completion; checkpoint.resume=auto": replace(kept, handle="gone"),
        "has other tokens of a completion than it told": replace(kept, digest="0"),
        "does not give the tokens of 1 completions .*401": replace(kept, key="another key"),
        "does not give the tokens of 1 completions .*ConnectError": replace(kept, url=f"http://127.0.0.1:{free_port()}"),
    }
    for message, columns in wrong.items():
        with pytest.raises(RunError, match=message) as caught:
            fetch_columns([kept, columns], True, SHAPE, 60.0)
        assert columns.key not in str(caught.value)


@pytest.mark.parametrize(
    "host, place", [("127.0.0.1", "here"), ("localhost", "here"), ("[::1]", "here"), ("10.0.0.7", "remote"), ("n7", "remote")]
)
def test_columns_of_an_engine_on_loopback_pass_rank_0_if_replicas_are_on_other_nodes(monkeypatch, host, place):
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "n1"}.items():
        monkeypatch.setenv(name, value)
    assert choose_place("remote", f"http://{host}:30000") == place
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert choose_place("remote", f"http://{host}:30000") == "remote"
