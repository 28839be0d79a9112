# SPDX-License-Identifier: Apache-2.0
"""What a runtime answers, and the tensors that say it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dflash_trt.triton.tensors import OUTPUTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NO_REASON = "None"
"""What NVIDIA's model sends for a reason that there is not."""
DATA_TYPES = {spec.name: spec.data_type for spec in OUTPUTS}


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer once it is whole."""

    finish_reason: str
    stop_reason: str | None
    """The stop text or token id that ended it."""
    cumulative_logprob: float | None
    perf_metrics: dict[str, float | int]
    """By the name of its output tensor."""


class Answer(msgspec.Struct, frozen=True):
    """An answer so far."""

    text: str
    new_text: str
    """What was added since the last one."""
    ending: Ending | None
    """On the last one."""


def answer_tensors(answer: Answer, returns: frozenset[str], *, deltas: bool) -> dict[str, npt.NDArray[np.generic]]:
    """The output tensors by name; `deltas` sends the new text alone. What the runtime does not know is left out."""
    values: dict[str, str | float | int] = {"text_output": answer.new_text if deltas else answer.text}
    if answer.ending is not None:
        values |= _requested(answer.ending, returns)
    return {name: _tensor(name, value) for name, value in values.items()}


def _requested(ending: Ending, returns: frozenset[str]) -> dict[str, str | float | int]:
    values: dict[str, str | float | int] = {}
    if "finish_reason" in returns:
        values["finish_reason"] = ending.finish_reason
    if "stop_reason" in returns:
        values["stop_reason"] = NO_REASON if ending.stop_reason is None else ending.stop_reason
    if "cumulative_logprob" in returns and ending.cumulative_logprob is not None:
        values["cumulative_logprob"] = ending.cumulative_logprob
    if "perf_metrics" in returns:
        values |= ending.perf_metrics
    return values


def _tensor(name: str, value: str | float | int) -> npt.NDArray[np.generic]:
    import numpy as np

    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    return np.array([value], dtype={"FP32": np.float32, "INT32": np.int32, "INT64": np.int64}[DATA_TYPES[name]])
