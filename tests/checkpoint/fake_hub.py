# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on this machine: the few endpoints that are used, with byte ranges, and what was asked of it."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves one directory as one repository."""

    def __init__(self, repository: str, directory: Path) -> None:
        self.repository = repository
        self.directory = directory
        self.sent: dict[str, int] = {}
        """Bytes by file."""
        self.endpoint = ""

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.directory)) for file in self.directory.rglob("*") if file.is_file())


@contextmanager
def fake_hub(repository: str, directory: Path) -> Iterator[FakeHub]:
    hub = FakeHub(repository, directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer_file(has_body=False)

        def do_GET(self) -> None:
            path = unquote(self.path).partition("?")[0]
            if re.fullmatch(rf"/api/models/{hub.repository}(/revision/\w+)?", path):
                files = [{"rfilename": name} for name in hub.files()]
                self.answer_json({"id": hub.repository, "sha": COMMIT, "siblings": files})
            elif path.startswith(f"/api/models/{hub.repository}/tree/"):
                self.answer_json([self.entry(name) for name in hub.files()])
            else:
                self.answer_file(has_body=True)

        def do_POST(self) -> None:
            fields = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            known = set(hub.files())
            self.answer_json([self.entry(name) for name in fields["paths"] if name in known])

        def entry(self, name: str) -> dict[str, object]:
            content = (hub.directory / name).read_bytes()
            return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

        def answer_json(self, document: object) -> None:
            self.answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def answer_file(self, *, has_body: bool) -> None:
            match = re.fullmatch(rf"/{hub.repository}/resolve/\w+/(.+)", unquote(self.path))
            file = hub.directory / match[1] if match else hub.directory / "nothing"
            if not file.is_file():
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if match else "RepoNotFound"})
                return
            content = file.read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            status, body = 200, content
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
                status, body = 206, content[begin : end + 1]
                headers["Content-Range"] = f"bytes {begin}-{begin + len(body) - 1}/{len(content)}"
            if has_body:
                name = str(file.relative_to(hub.directory))
                hub.sent[name] = hub.sent.get(name, 0) + len(body)
            self.answer(status, body, headers, has_body=has_body)

        def answer(self, status: int, body: bytes, headers: dict[str, str], *, has_body: bool = True) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
