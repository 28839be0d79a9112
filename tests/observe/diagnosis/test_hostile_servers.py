# SPDX-License-Identifier: Apache-2.0
"""`doctor URL` against servers that send a byte at a time, nothing, or what is no page: it ends, and never with health.

Without the deadline these tests take minutes, because every byte that comes restarts a time-out.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_trt.errors import EndpointError
from tests.cli.commands import run_here
from tests.observe.endpoints.canned import models

BYTE_SECONDS = 0.2
ANSWER = (
    b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}],'
    b' "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)
PAGES = {
    "/v1/models": models("vllm").encode(), "/version": b'{"version": "0.33.0"}', "/v1/chat/completions": ANSWER,
    "/metrics": b"vllm:num_requests_running 0\n",
}  # fmt: skip


@contextmanager
def hostile(*, slow_path: str = "", slow_part: str = "body", pages: dict[str, bytes] | None = None) -> Iterator[str]:
    """A server whose `slow_path` sends a byte every BYTE_SECONDS."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            is_slow = self.path == slow_path
            content = (PAGES | (pages or {})).get(self.path, b"") + b" " * 2000 * is_slow
            fields = f"content-length: {len(content)}\r\nconnection: close\r\nx: {'y' * 2000}"
            head = f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode()
            self._send(head, is_slow=is_slow and slow_part == "header")
            self._send(content, is_slow=is_slow)

        do_POST = do_GET  # noqa: N815  # http.server's name

        def _send(self, data: bytes, *, is_slow: bool) -> None:
            try:
                for index in range(len(data) if is_slow else 1):
                    self.wfile.write(data[index : index + 1] if is_slow else data)
                    if is_slow and over.wait(BYTE_SECONDS):
                        return
            except OSError:  # the client has cut the connection
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_trt.cli.doctor.GRACE_SECONDS", 0.2)


@pytest.mark.parametrize(("slow_path", "slow_part"), [("/v1/models", "header"), ("/v1/chat/completions", "body")])
def test_a_byte_at_a_time_ends_with_the_time_for_all(slow_path: str, slow_part: str) -> None:
    with (
        hostile(slow_path=slow_path, slow_part=slow_part) as url,
        pytest.raises(EndpointError, match="no answer before the time was up"),
    ):
        run_here("doctor", url, "--seconds", "1")


def test_a_silent_server_ends_with_the_time_for_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EndpointError, match="no answer before the time was up"):
            run_here("doctor", url, "--seconds", "1")


def test_metrics_that_come_a_byte_at_a_time_are_no_health(capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(slow_path="/metrics") as url, pytest.raises(EndpointError, match="too few answers"):
        run_here("doctor", url, "--seconds", "1")
    assert "nothing is wrong" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", [b"<html>no</html>", b"vllm:spec_decode_num_drafts_total{ 3\n", b"vllm:x \xff\xfe\n", b'{"a": 1}']
)
def test_metrics_that_are_no_page_are_a_finding(page: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(pages={"/metrics": page}) as url, pytest.raises(EndpointError, match="metrics cannot be read"):
        run_here("doctor", url, "--no-load")
    output = capsys.readouterr().out
    assert "WRONG: metrics cannot be read\n  its metrics cannot be read: " in output
    assert "expected Prometheus's text format" in output
    assert "nothing is wrong" not in output
