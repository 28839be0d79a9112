# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback whose pages a test writes: what runtimes that cannot run here answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Page = str | bytes | Callable[[], str] | tuple[int, str]


@contextmanager
def canned(pages: Mapping[str, Page]) -> Iterator[str]:
    """Gives its URL; a page may be text, a function that writes it, or a status and text. POST answers as GET."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            page = pages.get(self.path, (404, "no such page"))
            status, text = page if isinstance(page, tuple) else (200, page() if callable(page) else page)
            content = text if isinstance(text, bytes) else text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815  # http.server's name

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def models(owner: str, name: str = "m") -> str:
    """GET /v1/models."""
    return f'{{"object": "list", "data": [{{"id": "{name}", "object": "model", "owned_by": "{owner}"}}]}}'
