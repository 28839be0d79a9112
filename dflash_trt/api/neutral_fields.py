# SPDX-License-Identifier: Apache-2.0
"""Request fields of other servers that are not supported here, with the values that change nothing."""

from __future__ import annotations

from dflash_trt.errors import RequestError, shown

ANY = None
"""Marks a field that never changes the answer."""
NEUTRAL_VALUES: dict[str, tuple[object, ...] | None] = {
    **dict.fromkeys(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
         "prompt_cache_retention"),
        ANY,
    ),
    **dict.fromkeys(
        ("use_beam_search", "return_token_ids", "include_stop_str_in_output", "continue_final_message",
         "watermarking", "return_prompt_text", "return_token_offsets", "early_stopping", "no_stop_trim"),
        (False,),
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "spaces_between_special_tokens",
         "include_reasoning", "return_mm_kwargs", "separate_reasoning", "stream_reasoning"),
        (True,),
    ),
    **dict.fromkeys(("priority", "routed_experts_prompt_start"), (0,)),
    **dict.fromkeys(("top_a", "mirostat", "dry_multiplier", "xtc_probability"), (0, 0.0)),
    **dict.fromkeys(("typical_p", "tfs_z"), (1, 1.0)),
    **dict.fromkeys(("n", "best_of", "stream_interval"), (1,)),
    **dict.fromkeys(("bad_words", "functions"), ([],)),
    **dict.fromkeys(("guided_decoding", "multi_modal_data"), ({},)),
    **dict.fromkeys(("max_thinking_tokens", "prefill_result", "bootstrap_info"), ()),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "thinking_token_budget": (-1,),
}  # fmt: skip
"""Neutral values by field; null is one for each. A caller looks up only fields that it does not support."""

_NO_SWITCH = "here chat_template_kwargs is the switch, as far as the chat template has one"
_NO_ID = "here the header X-Request-Id names a request, in the log and in its answer"
IGNORED = {
    "verbosity": "a setting of OpenAI's own models, which no target here has",
    "thinking": _NO_SWITCH,
    "enable_thinking": _NO_SWITCH,
    "prediction": "only a hint for speed, and drafts come from the drafter",
    "cache_prompt": "only a hint for speed, and prompts are cached as the server was started",
    "request_id": _NO_ID,
    "rid": _NO_ID,
    "keep_alive": "the model stays loaded",
    "timings_per_token": "metrics stand in every answer without it",
    "provider": "there is one provider here, and nothing to route",
    "route": "there is one provider here, and nothing to route",
}
"""Fields that other servers take or ignore, each with the reason why an answer without it serves its sender.

A server ignores them and says so; a field that is here neither supported, neutral nor ignored is refused.
"""


def check_neutral(name: str, value: object, neutral: tuple[object, ...] | None = ANY, *, shown_as: str = "") -> None:
    """Raises RequestError for a value that would change the answer; `neutral` overrides the table."""
    values = NEUTRAL_VALUES[name] if neutral is ANY else neutral
    if value is None or values is ANY or any(type(value) is type(each) and value == each for each in values):
        return
    supported = f"only {' or '.join(map(repr, values))} is supported" if values else "it is not supported"
    raise RequestError(f"{shown_as or name}: {supported}, not {shown(value)}")
