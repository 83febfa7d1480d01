"""A server that closes a keep-alive connection when it is used again: requests that may be sent twice are sent again once."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config import Config
from megatron_rl.errors import EngineLostError
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import LaunchedServer
from rollout_sglang.rank_handler import PREFIX


class Handler(BaseHTTPRequestHandler):
    """Answers the first request of a connection, and closes the connection when a second one has arrived."""

    protocol_version = "HTTP/1.1"
    answers = 0

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        action = json.loads(content)["action"].removeprefix(PREFIX) if self.path == "/weights_checker" else "{}"
        self.server.asked.append(json.loads(action).get("verb", self.path))
        self.answers += 1
        if self.answers > self.server.answers_per_connection:
            self.close_connection = True
            return
        rank = {"checksums": {}, "parallelism_info": [{"tp_rank": 0}]}
        body = json.dumps({"ranks": [rank]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[SGLangEngine, Any]]:
    """An engine's client, and the server that it talks to."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answers_per_connection = [], 1
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    processes: Any = SimpleNamespace(
        has_ended=lambda: False, wait_for_end=lambda _: False, log=tmp_path / "log", log_tail=str, kill=lambda: None, stop=lambda: None
    )
    launched = LaunchedServer(processes, f"http://127.0.0.1:{server.server_port}", "key")
    config = Config.model_validate({"model": {"path": tmp_path}})
    spec: Any = SimpleNamespace(config=config, model_path=tmp_path, empty=True, start_process=lambda: launched)
    engine = SGLangEngine(spec)
    yield engine, server
    engine.stop()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("verb", ["ping", "served", "reread digests", "finish", "digest"])
def test_a_request_that_may_be_sent_twice_survives_a_closed_connection(served, verb):
    engine, server = served
    for _ in range(3):
        assert engine._ask_ranks({"verb": verb}) == [{}]
    assert server.asked == [verb] * 5, "the second and the third were sent twice"
    server.answers_per_connection = 0
    server.asked.clear()
    with pytest.raises(
        EngineLostError, match=r"does not answer /weights_checker \((ReadError|RemoteProtocolError); its process still runs"
    ):
        engine._ask_ranks({"verb": verb})
    assert len(server.asked) == 2, "it is sent again only once"


def test_what_would_happen_twice_is_not_sent_again(served):
    engine, server = served
    engine._post("/flush_cache", None)
    engine._post("/flush_cache", None)
    assert server.asked == ["/flush_cache"] * 3
    calls = ({"verb": "start"}, {"verb": "connect"})
    for call in calls:
        engine._ask_ranks({"verb": "ping"})
        server.asked.clear()
        with pytest.raises(EngineLostError, match="does not answer /weights_checker"):
            engine._ask_ranks(call)
        assert server.asked == [call["verb"]]
    for path in ("/generate", "/begin_weight_update", "/end_weight_update"):
        engine._ask_ranks({"verb": "ping"})
        server.asked.clear()
        with pytest.raises(EngineLostError, match=f"does not answer {path}"):
            engine._post(path, {})
        assert server.asked == [path]
