# SPDX-License-Identifier: Apache-2.0
"""Reads requests of Dynamo's frontend, which tokenises prompts and cuts text at `stop`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.api.neutral_fields import NEUTRAL_VALUES, check_neutral
from dflash_trt.api.sampling_params import DEFAULT_CHAT_TOKENS, OPENAI_TEMPERATURE, SAMPLER_FIELDS, SamplingParams

UNSUPPORTED = ("multi_modal_data", "prefill_result", "bootstrap_info")
"""Fields of a request itself; the other unsupported ones are in its groups."""
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")


def read_request(request: Mapping[str, Any], max_length: int) -> tuple[list[int], SamplingParams]:
    """Prompt and parameters; RequestError, with the field's name, for an unsupported value."""
    prompt = list(request["token_ids"])
    groups = ("sampling_options", "stop_conditions", "output_options")
    sampling, stop, output = (request.get(name) or {} for name in groups)
    for name, value in (sampling | stop | {name: request.get(name) for name in UNSUPPORTED}).items():
        if name in NEUTRAL_VALUES:
            check_neutral(name, value)
    check_neutral("prompt_logprobs", output.get("prompt_logprobs"), ())
    check_neutral("logprobs", output.get("logprobs"), (0, 1))  # 1 is the sampled token's own
    given: dict[str, Any] = {"temperature": OPENAI_TEMPERATURE}
    given |= {name: _decimal(sampling[name]) for name in SAMPLER_FIELDS if sampling.get(name) is not None}
    max_tokens = stop.get("max_tokens")
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_CHAT_TOKENS, max_length - len(prompt)))
    stop_ids = [id_ for name in STOP_IDS for id_ in stop.get(name) or ()]
    return prompt, SamplingParams(
        **given,
        max_tokens=max_tokens,
        min_tokens=stop.get("min_tokens") or 0,
        stop=stop.get("stop"),
        stop_token_ids=stop_ids,
        ignore_eos=bool(stop.get("ignore_eos")),
        logprobs=output.get("logprobs") is not None,
    )


def _decimal(value: float) -> float:
    """The number that the client wrote: it comes as a 32-bit float, 0.7 as 0.699999988."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
