"""A hub on this machine: an HTTP server that answers the requests of `snapshot_download` as huggingface.co does."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Models by name. Each is a folder whose branch `main` is `commits[name]`. `requests` lists all requests as "METHOD path"."""

    def __init__(self, url):
        self.url = url
        self.models = {}
        self.commits = {}
        self.gated = set()
        self.requests = []

    def add(self, name, folder, gated=False):
        """Add a model, or another commit of a model. Return the commit."""
        self.models[name], self.commits[name] = folder, hashlib.sha1(f"{name}{folder}".encode()).hexdigest()
        self.gated |= {name} if gated else set()
        return self.commits[name]

    def use(self, patch, cache):
        """Make huggingface_hub use this hub and this cache."""
        patch.setattr("huggingface_hub.constants.ENDPOINT", self.url)
        patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    @property
    def downloads(self):
        """The names of the files that were downloaded."""
        return [request.rpartition("/")[2] for request in self.requests if request.startswith("GET") and "/resolve/" in request]


def _make_handler(hub):
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            is_api = path.startswith("/api/models/")
            parts = path.removeprefix("/api/models").strip("/").split("/")
            if len(parts) < 4:
                return self.refuse(404, "")
            name, kind, revision, file = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
            if name not in hub.models:
                self.refuse(401, "RepoNotFound")
            elif revision not in ("main", hub.commits[name]):
                self.refuse(404, "RevisionNotFound")
            elif is_api:
                self.describe(name, kind)
            elif name in hub.gated:
                self.refuse(401, "GatedRepo")
            elif not (hub.models[name] / file).is_file():
                self.refuse(404, "EntryNotFound")
            else:
                content = (hub.models[name] / file).read_bytes()
                self.answer(200, content, {"X-Repo-Commit": hub.commits[name], "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

        def describe(self, name, kind):
            files = [file for file in sorted(hub.models[name].rglob("*")) if file.is_file()]
            names = {str(file.relative_to(hub.models[name])): file.stat().st_size for file in files}
            tree = [{"type": "file", "path": file, "size": size, "oid": file} for file, size in names.items()]
            about = {"id": name, "sha": hub.commits[name], "siblings": [{"rfilename": file} for file in names]}
            self.answer(200, json.dumps(about if kind == "revision" else tree).encode(), {"Content-Type": "application/json"})

        def refuse(self, status, code):
            self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": f"{code} of the fake hub"})

        def answer(self, status, content, headers):
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    return Handler


@contextmanager
def serve_hub():
    """Context manager with a hub that has no models yet."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = _make_handler(hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
