"""A stand-in for the Hugging Face hub: what its library asks for a commit of files, large ones by Git LFS."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"
LARGE = (".safetensors", ".gguf")


@dataclass
class Hub:
    """Repositories by name, with the files of their last commit."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Large files by sha256, committed or not."""
    refused: str = ""
    """The end of a request's path that is refused with 403."""


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            path, body = self.path.partition("?")[0], self._body()
            if self.headers["authorization"] != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            if hub.refused and path.endswith(hub.refused):
                return self._answer(403, {"error": "You don't have the right to write\nhere"})
            self._answer(200, self._done(path, body))

        def do_PUT(self) -> None:
            body = self._body()
            name = hashlib.sha256(body).hexdigest()
            assert self.path == f"/lfs/{name}"
            hub.uploaded[name] = body
            self._answer(200, {})

        def _done(self, path: str, body: bytes) -> Any:
            if path == "/api/validate-yaml":
                return {"errors": [], "warnings": []}
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.repositories.setdefault(name, {})
                return {"url": f"{hub.url}/{name}", "name": name, "id": name}
            if path.endswith(".git/info/lfs/objects/batch"):
                return {
                    "transfer": "basic",
                    "objects": [
                        {**wanted, "actions": {"upload": {"href": f"{hub.url}/lfs/{wanted['oid']}"}}}
                        for wanted in json.loads(body)["objects"]
                    ],
                }
            owner, name, what, revision = path.removeprefix("/api/models/").split("/")
            assert revision == "main"
            if what == "preupload":
                return {
                    "files": [
                        {
                            "path": asked["path"],
                            "uploadMode": "lfs" if asked["path"].endswith(LARGE) else "regular",
                            "shouldIgnore": False,
                        }
                        for asked in json.loads(body)["files"]
                    ]
                }
            assert what == "commit"
            files = hub.repositories[f"{owner}/{name}"]
            for kind, value in ((line["key"], line["value"]) for line in map(json.loads, body.splitlines())):
                if kind == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif kind == "lfsFile":
                    files[value["path"]] = hub.uploaded[value["oid"]]
            return {"commitUrl": f"{hub.url}/{owner}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["content-length"] or 0))

        def _answer(self, status: int, content: Any) -> None:
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
