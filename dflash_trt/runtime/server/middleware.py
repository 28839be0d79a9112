# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware around the routes: checks, error responses, the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.runtime.server.http_error import HttpError, error_response, shutting_down, to_http_error
from dflash_trt.runtime.server.telemetry.log import log

CLIENT_CLOSED_REQUEST = 499
"""Status of nginx for the access log; it is never sent."""
REQUEST_ID = re.compile(r"[!-~]{1,64}")


class CheckMiddleware:
    """Answers a request with the HttpError that `check` raises for it."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(Request(scope))
        except HttpError as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class ErrorMiddleware:
    """Responds to unexpected errors, and to tasks that are cancelled at shutdown.

    After a response of their own, Starlette and uvicorn close the connection without `connection: close`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_and_note_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_start)
        except asyncio.CancelledError:
            if not has_started:
                await error_response(shutting_down())(scope, receive, send)
        except Exception as error:
            refusal = to_http_error(error)
            if not has_started:
                await error_response(refusal)(scope, receive, send)


class AccessLogMiddleware:
    """Logs a line for each request: client, method, path, status, seconds, request id, tokens; never a prompt."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.perf_counter(), CLIENT_CLOSED_REQUEST
        client_id = Request(scope).headers.get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            path = scope["raw_path"].decode("ascii", "replace")[:200]  # with the escapes that were sent
            extra = "".join(f", {name} {value}" for name, value in scope.get("dflash_trt.log_fields", {}).items())
            client = scope["client"][0] if scope["client"] else "-"
            seconds = time.perf_counter() - begin
            line = "%s %s %s %d %.3f s, id %s%s"
            level = logging.DEBUG if path == "/health" and status == 200 else logging.INFO  # probes, every few seconds
            log.log(level, line, client, scope["method"], path, status, seconds, request_id, extra)
