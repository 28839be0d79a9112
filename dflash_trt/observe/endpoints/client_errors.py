# SPDX-License-Identifier: Apache-2.0
"""Errors of requests: what was refused, and why no answer came."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

from dflash_trt.errors import EndpointError, shown

if TYPE_CHECKING:
    import httpx2


SLOW_HINT = "is it overloaded? --seconds gives it more time"


def too_late(where: str) -> EndpointError:
    return EndpointError(f"{where}: no answer before the time was up", hint=SLOW_HINT)


def refusal(where: str, status: int, body: bytes) -> EndpointError:
    """The error for an answer other than 200."""
    hint = None
    if status in (401, 403):
        hint = "give the server's key with --api-key-file"
    elif status == 404:
        hint = "is this the address of an OpenAI-compatible server, without a path behind /v1?"
    elif 300 <= status < 400:
        hint = "redirections are not followed: give the address that it points to"
    message = body.decode(errors="replace").strip()
    return EndpointError(f"{where}: expected 200, found {status}: {shown(message)}", hint=hint, status=status)


def unreachable(where: str, error: httpx2.HTTPError) -> EndpointError:
    import httpx2

    if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return EndpointError(f"{where}: no server answered in time", hint="is it running?")
    if isinstance(error, httpx2.TimeoutException):
        return EndpointError(f"{where}: timed out waiting for an answer", hint="is it overloaded?")
    if isinstance(error, httpx2.ConnectError):
        message = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or "no connection"
        hint = "is it running, and is the port right?"
        if _is_unknown_host(error):
            hint = "is the host's name right, and can this machine resolve it?"
        elif "SSL" in message or "CERTIFICATE" in message.upper():
            hint = "is it https? Its certificate must be trusted here (SSL_CERT_FILE names others)"
        return EndpointError(f"cannot connect to {where}: {message}", hint=hint)
    return EndpointError(f"{where}: the answer broke off: {str(error) or type(error).__name__}")


def _is_unknown_host(error: BaseException | None) -> bool:
    """Searches the chain of causes, the only place where httpx2 keeps the resolver's error."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None
