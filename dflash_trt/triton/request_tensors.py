# SPDX-License-Identifier: Apache-2.0
"""Reads a request's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.api.neutral_fields import check_neutral
from dflash_trt.api.sampling_params import OPENAI_TEMPERATURE, SamplingParams
from dflash_trt.errors import ConfigError, RequestError, shown
from dflash_trt.files.strict_yaml import nearest
from dflash_trt.triton.tensors import INPUTS, SAMPLING, SAMPLING_STOP, TEXT_INPUT

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT_MAX_TOKENS = 32  # TensorRT-LLM's
UNCHANGED_FIELDS = frozenset(SamplingParams.__struct_fields__) - {"max_tokens", "temperature", "logprobs"}
"""Settings that are passed on unchanged, where the model has a tensor for them."""


REQUEST_ID = "id"
"""Parameter of Triton's own, which its HTTP endpoints pass on."""


class RequestInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: str
    params: SamplingParams
    streaming: bool
    """Whether each step gets a response, or only the last."""
    echo: bool
    """Whether the output begins with the prompt."""
    returns: frozenset[str]
    """Fields to return: any of finish_reason, stop_reason, cumulative_logprob and perf_metrics."""


def check_numpy() -> None:
    """Raises ConfigError for NumPy 2 beside nvidia-pytriton, whose Triton 2.51 crashes at the first request."""
    import numpy as np

    with suppress(PackageNotFoundError):
        bundle = version("nvidia-pytriton")
        if not np.__version__.startswith("1."):
            raise ConfigError(
                f"numpy: the Triton of nvidia-pytriton {bundle} takes arrays of NumPy 1, not of {np.__version__}",
                hint="pip install numpy==1.26.4",
            )


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Raises RequestError for a field that is no input, which Triton passes on as a parameter."""
    names = [spec.name for spec in INPUTS]
    for name in parameters:
        if name != REQUEST_ID:
            like = f"{SAMPLING}{name}" if f"{SAMPLING}{name}" in names else nearest(name, names)
            raise RequestError(
                f"{shown(name)} is not an input of this model" + (f"; did you mean {like}?" if like else "")
            )


def read_inputs(tensors: Mapping[str, npt.NDArray[np.generic]]) -> RequestInputs:
    """Raises RequestError for invalid inputs."""
    scalars = {
        spec.name: _scalar(spec.name, tensors[spec.name])
        for spec in INPUTS
        if spec.name in tensors and spec.name not in (TEXT_INPUT, SAMPLING_STOP)
    }
    sampling = {name.removeprefix(SAMPLING): value for name, value in scalars.items() if name.startswith(SAMPLING)}
    if SAMPLING_STOP in tensors:
        sampling["stop"] = _texts(SAMPLING_STOP, tensors[SAMPLING_STOP])
    returns = {name.removeprefix("return_") for name in scalars if name.startswith("return_") and scalars[name]}
    if sampling.get("return_perf_metrics", False):
        returns.add("perf_metrics")
    streaming = bool(scalars.get("streaming", False))
    return RequestInputs(
        prompt=_prompt(tensors),
        params=_params(sampling, with_logprobs="cumulative_logprob" in returns),
        streaming=streaming,
        echo=not streaming and not sampling.get("exclude_input_from_output", True),
        returns=frozenset(returns),
    )


def _params(fields: Mapping[str, Any], *, with_logprobs: bool) -> SamplingParams:
    """SamplingParams with TensorRT-LLM's defaults: greedy unless temperature, top_k or top_p is set."""
    check_neutral("best_of", fields.get("best_of"), shown_as=f"{SAMPLING}best_of")
    is_greedy = not fields.keys() & {"temperature", "top_k", "top_p"}
    return SamplingParams(
        max_tokens=fields.get("max_tokens", DEFAULT_MAX_TOKENS),
        temperature=fields.get("temperature", 0.0 if is_greedy else OPENAI_TEMPERATURE),
        logprobs=with_logprobs,
        **{name: fields[name] for name in UNCHANGED_FIELDS if name in fields},
    )


def is_stop(tensors: Mapping[str, npt.NDArray[np.generic]]) -> bool:
    """Whether a request only stops the requests with its id."""
    return "stop" in tensors and bool(_scalar("stop", tensors["stop"]))


def _prompt(tensors: Mapping[str, npt.NDArray[np.generic]]) -> str:
    if TEXT_INPUT not in tensors:
        raise RequestError(f"{TEXT_INPUT}: missing input")
    texts = _texts(TEXT_INPUT, tensors[TEXT_INPUT])
    if len(texts) != 1 or not texts[0]:
        raise RequestError(
            f"{TEXT_INPUT}: expected one prompt, found {'an empty text' if len(texts) == 1 else len(texts)}"
        )
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
