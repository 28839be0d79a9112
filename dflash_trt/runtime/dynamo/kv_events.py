# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's router learns of cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_trt.runtime.kvcache.prefix_index import ROOT


class KvEvents:
    """Shared pages as Dynamo's KV events: an entry's number is the hash of its block."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """A page that a prompt may begin with."""
        parent = None if before == ROOT else before
        self._publisher.publish_stored(list(token_ids), [len(token_ids)], [number], parent)

    def removed(self, number: int) -> None:
        """A page whose room was needed."""
        self._publisher.publish_removed([number])
