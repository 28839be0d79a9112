# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback whose pages a test writes: what runtimes that cannot run here answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from tests.loopback import Handler, listening

Page = str | bytes | Callable[[], str] | tuple[int, str]


def canned(pages: Mapping[str, Page]) -> AbstractContextManager[str]:
    """Gives its URL; a page may be text, a function that writes it, or a status and text. POST answers as GET."""

    class Canned(Handler):
        def get(self) -> None:
            self.body()
            page = pages.get(self.path, (404, "no such page"))
            status, text = page if isinstance(page, tuple) else (200, page() if callable(page) else page)
            self.answer(status, text if isinstance(text, bytes) else text.encode())

    return listening(Canned)


def models(owner: str, name: str = "m") -> str:
    """GET /v1/models."""
    return f'{{"object": "list", "data": [{{"id": "{name}", "object": "model", "owned_by": "{owner}"}}]}}'
