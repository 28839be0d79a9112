# SPDX-License-Identifier: Apache-2.0
"""Requests of Dynamo's frontend as prompts and SamplingParams.

The frontend tokenises, and cuts the text at `stop`; what neither it nor we can do is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.api.sampling_params import DEFAULT_CHAT_TOKENS, OPENAI_TEMPERATURE, SAMPLER_FIELDS, SamplingParams
from dflash_trt.errors import RequestError, shown

NO_EFFECT: dict[str, tuple[object, ...]] = {
    "sampling_options.n": (1,),
    "sampling_options.best_of": (1,),
    "sampling_options.use_beam_search": (False,),
    "sampling_options.length_penalty": (1.0,),
    "sampling_options.include_stop_str_in_output": (False,),
    "sampling_options.guided_decoding": ({},),
    "stop_conditions.min_tokens": (0,),
    "stop_conditions.max_thinking_tokens": (),
    "output_options.logprobs": (0, 1),
    "output_options.prompt_logprobs": (),
    "multi_modal_data": ({},),
    "prefill_result": (),
    "bootstrap_info": (),
}
"""What is not supported, with the values that ask for nothing; logprobs: 1 is the sampled token's own."""
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")


def read_request(request: Mapping[str, Any], max_length: int) -> tuple[list[int], SamplingParams]:
    """Prompt and parameters; RequestError, with the field's name, for what is not supported."""
    for name, values in NO_EFFECT.items():
        group, _, field = name.rpartition(".")
        value = ((request.get(group) or {}) if group else request).get(field)
        if value is not None and value not in values:
            expected = " or ".join(map(repr, values)) or "none"
            raise RequestError(f"{field}: expected {expected}, the only supported value, found {shown(value)}")
    prompt = list(request["token_ids"])
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    given: dict[str, Any] = {"temperature": OPENAI_TEMPERATURE}
    given |= {name: _decimal(sampling[name]) for name in SAMPLER_FIELDS if sampling.get(name) is not None}
    max_tokens = stop.get("max_tokens")
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_CHAT_TOKENS, max_length - len(prompt)))
    stop_ids = [id_ for name in STOP_IDS for id_ in stop.get(name) or ()]
    return prompt, SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=stop.get("stop"),
        stop_token_ids=stop_ids,
        ignore_eos=bool(stop.get("ignore_eos")),
        logprobs=(request.get("output_options") or {}).get("logprobs") is not None,
    )


def _decimal(value: float) -> float:
    """The number that the client wrote: it comes as a 32-bit float, 0.7 as 0.699999988."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
