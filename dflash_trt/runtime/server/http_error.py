# SPDX-License-Identifier: Apache-2.0
"""Responses with a JSON document, and errors in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.runtime.server.answer.bodies import Error, ErrorDescription
from dflash_trt.runtime.server.telemetry.log import log

FIELD = re.compile(r"([a-z_.]+)(\[\d+\])*: ")
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class HttpError(Exception):
    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """`message` begins with the name of the invalid field, if there is one."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> Error:
        field = FIELD.match(self.message)
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = field[1] if field else None
        return Error(ErrorDescription(self.message, kind, param, self.code or self.status))


def shutting_down() -> HttpError:
    """The 503 of a server that is shutting down."""
    return HttpError(503, "the server is shutting down", headers={"connection": "close"})


def to_http_error(error: Exception) -> HttpError:
    """Turns any error into a response; logs a 5xx with its traceback."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        return HttpError(400, error.message)
    log.error("%s", error, exc_info=error)
    if isinstance(error, DFlashError):
        return HttpError(500, error.message)
    return HttpError(500, "internal server error: see the server's log")


class StructResponse(Response):
    """Response with a JSON document."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


def error_response(error: HttpError) -> Response:
    """The response to a request that failed."""
    return StructResponse(error.body(), error.status, headers=error.headers)
