# SPDX-License-Identifier: Apache-2.0
"""Responses with a JSON document."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from dflash_trt.runtime.server.http_error import HttpError


class StructResponse(Response):
    """Response with a JSON document."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encodes the document."""
        return msgspec.json.encode(content)


def error_response(error: HttpError) -> Response:
    """The response to a request that failed."""
    return StructResponse(error.body(), error.status, headers=error.headers)
