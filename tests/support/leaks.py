"""Parts of a run that repeat secrets wherever they can."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import environ

from support.agent_programs import post

KEYS_FILE = "MEGATRON_RL_TEST_KEYS"
"""Environment variable with the file to which agents write their keys, for the test alone."""


def repeat_key(problem):
    """Tell the policy the episode's key and a secret of the environment, and fail with both for every other problem."""
    key = environ["OPENAI_API_KEY"]
    with open(environ[KEYS_FILE], "a") as file:
        file.write(f"{key}\n")
    secrets = f"{key} {environ['WANDB_API_KEY']}"
    post([{"role": "user", "content": f"{problem.prompt} {secrets}"}], max_tokens=6)
    print(secrets, file=sys.stderr)
    if len(problem.prompt) % 2:
        raise KeyError(f"https://me:{environ['WANDB_API_KEY']}@host/?token={key}")


class Tracker:
    """Fails with a secret in its message, after it has received the configuration."""

    def __init__(self, folder, config, resume_step):
        (folder / "tracked.json").write_text(json.dumps(config))

    def log(self, row, step):
        raise ValueError(f"no access with {environ['WANDB_API_KEY']}")

    def finish(self, status): ...


class _Scores(BaseHTTPRequestHandler):
    def do_POST(self):
        count = len(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["texts"])
        self.server.requests += 1
        fails = self.server.requests % 2 == 0
        body = f"no access with {self.headers['Authorization']}" if fails else json.dumps({"rewards": [0.5] * count})
        self.send_response(403 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_): ...


@contextmanager
def reward_server():
    """A reward server that repeats its token in every second answer. Yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Scores) as server:
        server.requests = 0
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/score"
        finally:
            server.shutdown()
            thread.join()
