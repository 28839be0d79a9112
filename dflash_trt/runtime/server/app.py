# SPDX-License-Identifier: Apache-2.0
"""The server as an ASGI application."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.errors import DFlashError, shown
from dflash_trt.runtime.server.endpoints import Endpoints, StructResponse
from dflash_trt.runtime.server.http_error import HttpError, shutting_down, to_http_error
from dflash_trt.runtime.server.limits import ApiKeys
from dflash_trt.runtime.server.log import log
from dflash_trt.runtime.server.openapi import OPERATIONS, document
from dflash_trt.runtime.server.streaming import ClientDisconnected

PAGE = Path(__file__).parent / "page"
PUBLIC_PATHS = ("/", "/docs", "/openapi.json", "/health")
"""Paths that need no key; those below /page/ need none, either."""
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
CLIENT_CLOSED_REQUEST = 499
"""Status of nginx for the access log; it is never sent."""
REQUEST_ID = re.compile(r"[!-~]{1,64}")


def make_app(
    endpoints: Endpoints,
    *,
    keys: ApiKeys | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
) -> ASGIApp:
    """The routes behind API keys, CORS for `origins`, a check of the Host header and the access log.

    `hosts` are accepted besides loopback names; None accepts any.
    """
    routes = [
        Route("/", partial(_page, "index.html")),
        Route("/docs", partial(_page, "docs.html")),
        Route("/openapi.json", _openapi),
        Mount("/page", StaticFiles(directory=PAGE)),
        *(Route(each.path, getattr(endpoints, each.handler), methods=[each.method]) for each in OPERATIONS),
    ]
    middleware = [Middleware(ErrorMiddleware)]
    if hosts is not None:
        names = frozenset(host.lower() for host in hosts)
        middleware.append(Middleware(CheckMiddleware, check=partial(_check_host, names)))
    if origins:  # outside of the key check: a CORS preflight has no key
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.append(cors)
    if keys is not None:
        middleware.append(Middleware(CheckMiddleware, check=partial(_check_key, keys)))
    handlers = {
        HttpError: _on_error,
        DFlashError: _on_error,
        HTTPException: _on_routing_error,
        ClientDisconnected: _on_disconnect,
    }
    return AccessLogMiddleware(Starlette(routes=routes, middleware=middleware, exception_handlers={**handlers}))


class CheckMiddleware:
    """Answers a request with the HttpError that `check` raises for it."""

    def __init__(self, app: ASGIApp, check: Callable[[Request], None]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        try:
            self._check(Request(scope))
        except HttpError as error:
            await _response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _check_key(keys: ApiKeys, request: Request) -> None:
    """Raises HttpError 401 without a key, except on public paths."""
    if (path := request.scope["path"]) not in PUBLIC_PATHS and not path.startswith("/page/"):
        request.scope["dflash_trt.client"] = keys.check(request.headers.get("authorization", ""))


def _check_host(names: frozenset[str], request: Request) -> None:
    """Raises HttpError 403 for hosts that are neither loopback names nor in `names`.

    A page whose name is rebound to 127.0.0.1 sends its own name.
    """
    if (host := request.headers.get("host")) is None:  # HTTP/1.0; browsers send it
        return
    name = re.sub(r":\d*$", "", host.lower()).strip("[]")
    is_loopback = name == "localhost" or name.endswith(".localhost")
    with suppress(ValueError):
        is_loopback = is_loopback or ipaddress.ip_address(name).is_loopback
    if not is_loopback and name not in names:
        raise HttpError(403, f"host: expected a loopback name or an --allowed-host, found {shown(host)}")


class ErrorMiddleware:
    """Responds to unexpected errors, and to tasks that are cancelled at shutdown.

    Starlette and uvicorn close the connection after their own response without a header that says so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        has_started = False

        async def send_and_note_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_start)
        except asyncio.CancelledError:
            if not has_started:
                await _response(shutting_down())(scope, receive, send)
        except Exception as error:
            refusal = to_http_error(error)
            if not has_started:
                await _response(refusal)(scope, receive, send)


class AccessLogMiddleware:
    """Logs a line for each request: client, method, path, status, seconds, request id, tokens; never a prompt."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
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
            log.info(line, client, scope["method"], path, status, seconds, request_id, extra)


async def _page(name: str, request: Request) -> Response:
    return FileResponse(PAGE / name, headers=PAGE_HEADERS)


async def _openapi(request: Request) -> Response:
    return StructResponse(document())


def _response(error: HttpError) -> Response:
    return StructResponse(error.body(), error.status, headers=error.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    return _response(to_http_error(error))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # never sent


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _response(HttpError(error.status_code, message, headers=error.headers))
