# SPDX-License-Identifier: Apache-2.0
"""The server as an ASGI application."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.errors import DFlashError
from dflash_trt.server.endpoints import Endpoints
from dflash_trt.server.http_refusal import Refusal, refusal_of
from dflash_trt.server.limits import Keys
from dflash_trt.server.listener import GoneError

PAGE = Path(__file__).parent / "page"
OPEN = ("/", "/health")
"""Paths that need no key, and those below /page/."""
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
CLIENT_GONE = 499
"""nginx's status, for the log."""
log = logging.getLogger("dflash_trt.server")


def make_app(endpoints: Endpoints, *, keys: Keys | None = None, origins: Sequence[str] = ()) -> ASGIApp:
    """All paths, and around them keys, CORS for `origins` and a line of log."""
    routes = [
        Route("/", _page),
        Mount("/page", StaticFiles(directory=PAGE)),
        Route("/v1/models", endpoints.models),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/version", endpoints.version),
        Route("/metrics", endpoints.metrics),
    ]
    middleware = [Middleware(KeyCheck, keys=keys)] if keys is not None else []
    if origins:  # before the keys: a browser asks first without one
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    handlers = {Refusal: _refuse, DFlashError: _refuse, HTTPException: _http_error, GoneError: _gone}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={**handlers, Exception: _refuse})
    return RequestLog(app)


class KeyCheck:
    """Lets those with a key through, and everybody to the open paths."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["path"] not in OPEN and not scope["path"].startswith("/page/"):
            try:
                self._keys.check(Request(scope).headers.get("authorization", ""))
            except Refusal as refusal:
                await _response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class RequestLog:
    """One line for each request: who, what, how it ended and what it cost; never a prompt."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), CLIENT_GONE

        async def send_and_see(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_see)
        finally:
            path = scope["raw_path"].decode("ascii", "replace")[:200]  # as it was sent, with its escapes
            notes = "".join(f", {name} {value}" for name, value in scope.get("dflash_trt.note", {}).items())
            client = scope["client"][0] if scope["client"] else "-"
            seconds = time.perf_counter() - begin
            log.info("%s %s %s %d %.3f s%s", client, scope["method"], path, status, seconds, notes)


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)


def _response(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)


async def _refuse(request: Request, error: Exception) -> Response:
    return _response(refusal_of(error))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # to nobody


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers)
    return _response(refusal)
