# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback, whose answers a test writes."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Logs nothing; POST and HEAD answer as GET does."""

    wbufsize = -1  # head and body in one packet

    def get(self) -> None:
        raise NotImplementedError

    def post(self) -> None:
        self.get()

    def head(self) -> None:
        self.get()

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post()

    def do_HEAD(self) -> None:
        self.head()

    def body(self) -> bytes:
        """The data that was sent."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(
        self, status: int, content: bytes = b"", headers: Mapping[str, str] = {}, *, has_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(handler: type[Handler]) -> Iterator[str]:
    """Gives its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
