# SPDX-License-Identifier: Apache-2.0
"""Logits processors and acceptance rules of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import numpy as np
import numpy.typing as npt

from dflash_trt.api.plugins import ACCEPTANCE_RULES, LOGITS_PROCESSORS, blamed, chosen, installed, loaded
from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime.logits_processors import LogitsProcessor

Row = npt.NDArray[np.float32]
Accepts = Callable[[Row, int], bool]
"""Whether a draft token is accepted, by the target's logits [V] in its place."""


class PluginProcessor:
    """A plug-in's logits processor; an exception in it ends the request, and names the plug-in."""

    def __init__(self, entry: EntryPoint, processor: LogitsProcessor) -> None:
        self._entry, self._processor = entry, processor
        self._error: RequestError | None = None

    def process(self, logits: Row, proposals: Sequence[int]) -> None:
        """Changes rows [K + 1, V] in place."""
        if self._error is not None:
            raise self._error
        with blamed(self._entry, error=RequestError):
            self._processor.process(logits, proposals)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that were appended to the answer; if the plug-in fails, the next `process` raises."""
        with self._error_kept():
            self._processor.advance(token_ids)

    def forced(self) -> list[int]:
        """Tokens that must come next; none if the plug-in fails, and the next `process` raises."""
        with self._error_kept():
            return self._processor.forced()
        return []

    @contextmanager
    def _error_kept(self) -> Iterator[None]:
        try:
            with blamed(self._entry, error=RequestError):
                yield
        except RequestError as error:
            self._error = error


class AcceptanceRule:
    """Accepts drafts that the target would not have drawn: leaves their rows no other token.

    The output then depends on the drafts: it is lossy. A token that earlier processors rule out is never accepted.
    """

    def __init__(self, entry: EntryPoint, accepts: Accepts) -> None:
        self._entry, self._accepts = entry, accepts

    def process(self, logits: Row, proposals: Sequence[int]) -> None:
        """Changes the rows of accepted proposals, up to the first that the rule leaves to the target."""
        for row, token in zip(logits, proposals, strict=False):
            with blamed(self._entry, error=RequestError):
                if not np.isfinite(row[token]) or not self._accepts(row, token):
                    return
            kept = row[token]
            row.fill(-np.inf)
            row[token] = kept

    def advance(self, token_ids: Sequence[int]) -> None:
        """Does nothing: each row is judged alone."""

    def forced(self) -> list[int]:
        """Forces none."""
        return []


def plugin_processors(params: SamplingParams, vocab_size: int) -> Iterator[LogitsProcessor]:
    """The processors that installed plug-ins make for a request; each may have none for it."""
    for entry in installed(LOGITS_PROCESSORS):
        make = loaded(entry)
        with blamed(entry):
            processor = make(params, vocab_size)
        if processor is not None:
            yield PluginProcessor(entry, processor)


def acceptance_rule(name: str) -> AcceptanceRule | None:
    """The rule that `RuntimeOptions.acceptance_rule` names, None for the exact one; RequestError for an unknown one."""
    if name == DEFAULTS.acceptance_rule:
        return None
    entry = chosen(ACCEPTANCE_RULES, name, "acceptance_rule", (DEFAULTS.acceptance_rule,))
    return AcceptanceRule(entry, loaded(entry))
