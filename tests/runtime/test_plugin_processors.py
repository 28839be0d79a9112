# SPDX-License-Identifier: Apache-2.0
"""A plug-in's logits processor that fails ends its request, wherever it fails, and is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.metadata import EntryPoint

import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt.api.plugins import LOGITS_PROCESSORS
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.runtime import session as session_module
from dflash_trt.runtime.logits_processors import LogitsProcessor
from dflash_trt.runtime.plugin_processors import PluginProcessor
from tests.decoding import greedy, open_trained


class Failing:
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self._method = method

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        self._fail_in("process")

    def advance(self, token_ids: Sequence[int]) -> None:
        self._fail_in("advance")

    def forced(self) -> list[int]:
        self._fail_in("forced")
        return []

    def _fail_in(self, method: str) -> None:
        if method == self._method:
            raise KeyError(method)


@pytest.mark.parametrize("method", ["process", "advance", "forced"])
def test_only_its_request_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "no_such_module:processor", LOGITS_PROCESSORS)

    def processors(params: SamplingParams, vocab_size: int) -> Iterator[LogitsProcessor]:
        if params.stop_ids:
            yield PluginProcessor(entry, Failing(method))

    monkeypatch.setattr(session_module, "plugin_processors", processors)
    session = open_trained("tiny-qwen3", max_batch_size=2)
    with closing(session):
        failing, other = session.request([5, 6, 7], greedy(6, [500])), session.request([5, 6, 7], greedy(6))
        session.decoder().run([failing, other])
    assert isinstance(failing.error, RequestError)
    message = f"the plug-in mine (logits processor of an unknown distribution) failed: KeyError: '{method}'"
    assert message in str(failing.error)
    assert (other.error, len(other.token_ids)) == (None, 6)
