# SPDX-License-Identifier: Apache-2.0
"""Events about shared pages for Dynamo's router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_trt.runtime.kvcache.prefix_index import ROOT


class KvEvents:
    """Publishes shared pages as Dynamo's KV events; the number of an entry is the hash of its block."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """Publishes a page that prompts can reuse."""
        parent = None if before == ROOT else before
        self._publisher.publish_stored(list(token_ids), [len(token_ids)], [number], parent)

    def removed(self, number: int) -> None:
        """Publishes that a page was evicted."""
        self._publisher.publish_removed([number])
