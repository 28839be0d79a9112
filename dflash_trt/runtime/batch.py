# SPDX-License-Identifier: Apache-2.0
"""The requests that take part in a step, and what it asks of all of them at once."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.runtime.request import Request


class Batch:
    """Running requests, sorted by what a step does with them; it serves all steps until one joins, leaves or changes.

    So a step looks at a request only to advance it.
    """

    def __init__(self, running: Mapping[int, Request]) -> None:
        self.clients = [request.client for request in running.values()]
        """Client of each request."""
        self.reading = [(slot, request) for slot, request in running.items() if request.num_unread]
        """Slots and requests whose prompts are still being read, in the order of admission."""
        going = ((slot, running[slot]) for slot in sorted(running))
        self.decoding = {slot: each for slot, each in going if not each.num_unread and each.ending is None}
        """Requests whose prompts have been read and whose answers go on, by slot, in the order of slots."""
        self.answers = [request.answer for request in self.decoding.values()]
        self.asked = [request.params.draft_length for request in self.decoding.values()]
        """Draft length that each of them asks for."""
        self.has_processors = any(request.processors for request in self.decoding.values())
