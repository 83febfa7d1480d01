"""A hub on this machine: an HTTP server that answers the requests of `snapshot_download` as huggingface.co does."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub(ThreadingHTTPServer):
    """Models by name. Each is a folder whose branch `main` is `commits[name]`. `requests` lists all requests as "METHOD path"."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models, self.commits, self.gated, self.requests = {}, {}, set(), []

    def add(self, name, folder, gated=False):
        """Add a model, or another commit of a model."""
        self.models[name], self.commits[name] = folder, hashlib.sha1(f"{name}{folder}".encode()).hexdigest()
        self.gated |= {name} if gated else set()

    def use(self, patch, cache):
        """Make huggingface_hub use this hub and this cache."""
        patch.setattr("huggingface_hub.constants.ENDPOINT", self.url)
        patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    @property
    def downloads(self):
        """The names of the files that were downloaded."""
        return [request.rpartition("/")[2] for request in self.requests if request.startswith("GET") and "/resolve/" in request]


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        if len(parts) < 4:
            return self.refuse(404, "")
        name, kind, revision, file = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
        if name not in hub.models:
            self.refuse(401, "RepoNotFound")
        elif revision not in ("main", hub.commits[name]):
            self.refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/"):
            files = {str(file.relative_to(hub.models[name])): file for file in hub.models[name].rglob("*") if file.is_file()}
            tree = [{"type": "file", "path": name, "size": file.stat().st_size, "oid": name} for name, file in sorted(files.items())]
            about = {"id": name, "sha": hub.commits[name], "siblings": [{"rfilename": each["path"]} for each in tree]}
            self.answer(200, json.dumps(about if kind == "revision" else tree).encode(), {"Content-Type": "application/json"})
        elif name in hub.gated:
            self.refuse(401, "GatedRepo")
        elif not (hub.models[name] / file).is_file():
            self.refuse(404, "EntryNotFound")
        else:
            content = (hub.models[name] / file).read_bytes()
            self.answer(200, content, {"X-Repo-Commit": hub.commits[name], "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    do_HEAD = do_GET

    def refuse(self, status, code):
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": f"{code} of the fake hub"})

    def answer(self, status, content, headers):
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def serve_hub():
    """Context manager with a hub that has no models yet."""
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
