# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, read from its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.errors import RequestError
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.triton.tensors import INPUTS, SAMPLING, TEXT_INPUT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SAMPLING_STOP = "sampling_param_stop"


DEFAULT_MAX_TOKENS = 32  # TensorRT-LLM's
SAME_NAMES = ("top_k", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop")


class RequestInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: str
    params: SamplingParams
    streaming: bool
    """Whether each step is answered, or only the last."""
    echo: bool
    """Whether the prompt stands before the answer."""
    returns: frozenset[str]
    """Which of finish_reason, stop_reason, cumulative_logprob and perf_metrics the answer brings."""


def read_inputs(tensors: Mapping[str, npt.NDArray[np.generic]]) -> RequestInputs:
    """Raises RequestError for what no runtime could serve."""
    scalars = {
        spec.name: _scalar(spec.name, tensors[spec.name])
        for spec in INPUTS
        if spec.name in tensors and spec.name not in (TEXT_INPUT, SAMPLING_STOP)
    }
    sampling = {name.removeprefix(SAMPLING): value for name, value in scalars.items() if name.startswith(SAMPLING)}
    if SAMPLING_STOP in tensors:
        sampling["stop"] = _texts(SAMPLING_STOP, tensors[SAMPLING_STOP])
    wanted = {name.removeprefix("return_") for name in scalars if name.startswith("return_") and scalars[name]}
    if sampling.get("return_perf_metrics", False):
        wanted.add("perf_metrics")
    streaming = bool(scalars.get("streaming", False))
    return RequestInputs(
        prompt=_prompt(tensors),
        params=_params(sampling, with_logprobs="cumulative_logprob" in wanted),
        streaming=streaming,
        echo=not streaming and not sampling.get("exclude_input_from_output", True),
        returns=frozenset(wanted),
    )


def _params(given: Mapping[str, Any], *, with_logprobs: bool) -> SamplingParams:
    """Our settings, with TensorRT-LLM's defaults: greedy where neither temperature, top_k nor top_p is given."""
    if given.get("best_of", 1) != 1:
        raise RequestError(f"sampling_param_best_of: expected 1, found {given['best_of']}")
    is_greedy = not given.keys() & {"temperature", "top_k", "top_p"}
    return SamplingParams(
        max_tokens=given.get("max_tokens", DEFAULT_MAX_TOKENS),
        temperature=given.get("temperature", 0.0 if is_greedy else 1.0),
        logprobs=with_logprobs,
        **{name: given[name] for name in SAME_NAMES if name in given},
    )


def is_stop(tensors: Mapping[str, npt.NDArray[np.generic]]) -> bool:
    """Whether a request only ends the earlier requests of its id."""
    return "stop" in tensors and bool(_scalar("stop", tensors["stop"]))


def _prompt(tensors: Mapping[str, npt.NDArray[np.generic]]) -> str:
    if TEXT_INPUT not in tensors:
        raise RequestError(f"{TEXT_INPUT}: expected a prompt, found no such input")
    texts = _texts(TEXT_INPUT, tensors[TEXT_INPUT])
    if len(texts) != 1 or not texts[0]:
        found = "an empty one" if len(texts) == 1 else len(texts)
        raise RequestError(f"{TEXT_INPUT}: expected one prompt a request, found {found}")
    return texts[0]


def _scalar(name: str, tensor: npt.NDArray[np.generic]) -> Any:
    if tensor.size != 1:
        raise RequestError(f"{name}: expected one value, found {tensor.size}")
    return tensor.item()


def _texts(name: str, tensor: npt.NDArray[np.generic]) -> tuple[str, ...]:
    try:
        return tuple(item.decode() if isinstance(item, bytes) else str(item) for item in tensor.reshape(-1).tolist())
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8, found {error.reason} at byte {error.start}") from None
