# SPDX-License-Identifier: Apache-2.0
"""Checks of a request's API key and of its Host header."""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

from starlette.requests import Request

from dflash_trt.errors import shown
from dflash_trt.runtime.server.api_keys import ApiKeys
from dflash_trt.runtime.server.http_error import HttpError

PUBLIC_PATHS = ("/", "/docs", "/openapi.json", "/health")
"""Paths that need no key; those below /page/ need none, either."""


def check_key(keys: ApiKeys, request: Request) -> None:
    """Raises HttpError 401 without a key, except on public paths."""
    if (path := request.scope["path"]) not in PUBLIC_PATHS and not path.startswith("/page/"):
        request.scope["dflash_trt.client"] = keys.check(request.headers.get("authorization", ""))


def check_host(names: frozenset[str], request: Request) -> None:
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
