# SPDX-License-Identifier: Apache-2.0
"""Draft-length policies of plug-ins."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

from dflash_trt.api.plugins import blamed, expect, loaded
from dflash_trt.errors import PluginError
from dflash_trt.runtime.policy.draft_length import DraftLength
from dflash_trt.runtime.policy.step_record import StepRecord


class PluginLength(DraftLength):
    """A plug-in's policy; an exception in it, or a length out of range, names the plug-in."""

    def __init__(self, entry: EntryPoint, num_draft_tokens: int) -> None:
        self._entry, self._most = entry, num_draft_tokens
        make = loaded(entry)
        with blamed(entry):
            self._policy = make(num_draft_tokens)
        expect(entry, self._policy, DraftLength)

    def choose(self, batch_size: int) -> int:
        with blamed(self._entry):
            return self._checked(self._policy.choose(batch_size), self._most)

    def of_request(self, asked: int, chosen: int) -> int:
        with blamed(self._entry):
            return self._checked(self._policy.of_request(asked, chosen), self._most)

    def cut_length(self, survival: Sequence[float]) -> int:
        with blamed(self._entry):
            return self._checked(self._policy.cut_length(survival), len(survival))

    def observe(self, step: StepRecord) -> None:
        with blamed(self._entry):
            self._policy.observe(step)

    def explain(self) -> str:
        with blamed(self._entry):
            return f"{self._entry.name}: {self._policy.explain()}"

    def _checked(self, length: int, most: int) -> int:
        if length not in range(most + 1):
            raise PluginError(f"the plug-in {self._entry.name}: expected 0 to {most} draft tokens, found {length}")
        return length
