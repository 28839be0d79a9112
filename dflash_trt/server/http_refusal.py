# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's shape, with our message."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from dflash_trt.errors import DFlashError, RequestError

log = logging.getLogger("dflash_trt.server")
FIELD = re.compile(r"([a-z_]+)(\[\d+\])*: ")
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):  # noqa: N818  # an answer like any other
    """What is answered instead of what was asked for."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """`message` begins with the name of the field that is wrong, if one is."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON that says so."""
        field = FIELD.match(self.message)
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = field[1] if field else None
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code or self.status}}


def refusal_of(error: Exception) -> Refusal:
    """What who asked is told of an error; what only we can mend stays in the log."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestError):
        return Refusal(400, error.message)
    log.error("%s", error, exc_info=error)
    if isinstance(error, DFlashError):
        return Refusal(500, error.message)
    return Refusal(500, "an internal error: the server's log says more")
