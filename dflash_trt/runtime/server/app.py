# SPDX-License-Identifier: Apache-2.0
"""The server as an ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
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
from starlette.types import ASGIApp

from dflash_trt.errors import DFlashError
from dflash_trt.runtime.server.access import ApiKeys, check_host, check_key
from dflash_trt.runtime.server.disconnect import ClientDisconnected
from dflash_trt.runtime.server.endpoints import Endpoints
from dflash_trt.runtime.server.http_error import HttpError, StructResponse, error_response, to_http_error
from dflash_trt.runtime.server.middleware import (
    CLIENT_CLOSED_REQUEST,
    AccessLogMiddleware,
    CheckMiddleware,
    ErrorMiddleware,
)
from dflash_trt.runtime.server.openapi import OPERATIONS, document
from dflash_trt.runtime.server.page_verdict import judge_pairs

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def make_app(
    endpoints: Endpoints,
    *,
    keys: ApiKeys | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
) -> ASGIApp:
    """The routes, with API keys, CORS for `origins`, a check of the Host header and the access log.

    `hosts` are accepted besides loopback names; None accepts any.
    """
    routes = [
        Route("/", partial(_page, "index.html")),
        Route("/docs", partial(_page, "docs.html")),
        Route("/openapi.json", _openapi),
        Route("/paired-speed", judge_pairs, methods=["POST"]),
        Mount("/page", StaticFiles(directory=PAGE)),
        *(Route(_pattern(each.path), getattr(endpoints, each.handler), methods=[each.method]) for each in OPERATIONS),
    ]
    middleware = [Middleware(ErrorMiddleware)]
    if hosts is not None:
        names = frozenset(host.lower() for host in hosts)
        middleware.append(Middleware(CheckMiddleware, check=partial(check_host, names)))
    if origins:  # outside of the key check: a CORS preflight has no key
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.append(cors)
    if keys is not None:
        middleware.append(Middleware(CheckMiddleware, check=partial(check_key, keys)))
    handlers = {
        HttpError: _on_error,
        DFlashError: _on_error,
        HTTPException: _on_routing_error,
        ClientDisconnected: _on_disconnect,
    }
    return AccessLogMiddleware(Starlette(routes=routes, middleware=middleware, exception_handlers={**handlers}))


def _pattern(path: str) -> str:
    """Starlette's pattern of a path; a parameter may contain slashes."""
    return path.replace("}", ":path}")


async def _page(name: str, request: Request) -> Response:
    return FileResponse(PAGE / name, headers=PAGE_HEADERS)


async def _openapi(request: Request) -> Response:
    return StructResponse(document())


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(to_http_error(error))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # never sent


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(HttpError(error.status_code, message, headers=error.headers))
