# SPDX-License-Identifier: Apache-2.0
"""Each field of vLLM's requests is honoured, without effect, or refused by name: none is silently dropped.

The fields are those of vllm/entrypoints/openai/{completion,chat_completion}/protocol.py @ 002032e (July 2026).
"""

from __future__ import annotations

from typing import Any

from dflash_trt.api.neutral_fields import NEUTRAL_VALUES
from dflash_trt.runtime.server.requests import OTHER_FIELDS, SAMPLING_FIELDS
from tests.runtime.server.live import Live

HONOURED = {
    "model", "prompt", "messages", "echo", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "seed", "stop", "stream", "stream_options", "temperature",
    "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "response_format",
    "structured_outputs", "return_tokens_as_token_ids", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "chat_template_kwargs",
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "suffix": "x", "use_beam_search": True, "watermarking": True, "length_penalty": 2.0, "min_tokens": 1,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5, "truncation_side": "left", "allowed_token_ids": [1], "prompt_logprobs": 1,
    "logprob_token_ids": [1], "bad_words": ["x"], "prompt_embeds": "x", "add_special_tokens": False, "priority": 1,
    "request_id": "x", "session_id": "x", "return_token_ids": True, "routed_experts_prompt_start": 1,
    "return_token_offsets": True, "return_mm_kwargs": False, "cache_salt": "x", "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "repetition_detection": {"a": 1},
    "thinking_token_budget": 5, "stream_interval": 2, "include_reasoning": False, "add_generation_prompt": False,
    "continue_final_message": True, "documents": [{"a": "b"}], "chat_template": "x", "media_io_kwargs": {"a": {}},
    "mm_processor_kwargs": {"a": 1}, "return_prompt_text": True,
}  # fmt: skip
VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1, "stop": [], "stream": False, "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [],
    "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "bad_words": [], "echo": False, "priority": 0, "watermarking": False,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_mm_kwargs": True,
    "thinking_token_budget": -1, "stream_interval": 1, "tool_choice": "none", "parallel_tool_calls": True,
}  # fmt: skip
CHAT_DEFAULTS: dict[str, Any] = VLLM_DEFAULTS | {
    "logprobs": False, "top_logprobs": 0, "include_reasoning": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "return_prompt_text": False,
}  # fmt: skip


def test_defaults_of_vllm_may_be_spelled_out(live: Live) -> None:
    live.complete(prompt="x", max_tokens=1, add_special_tokens=True, **VLLM_DEFAULTS)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **CHAT_DEFAULTS}
    assert live.post("/v1/chat/completions", **chat).status_code == 200
    bodies: list[tuple[dict[str, Any], bool]] = [({"prompt": "x"}, True), ({"messages": chat["messages"]}, False)]
    for body, special in bodies:
        assert live.post("/tokenize", **body, add_special_tokens=special).status_code == 200
        refused = live.post("/tokenize", **body, add_special_tokens=not special).json()
        assert refused["error"]["param"] == "add_special_tokens"


def test_each_field_of_vllm(live: Live) -> None:
    supported = OTHER_FIELDS | set(SAMPLING_FIELDS)
    assert supported >= HONOURED
    assert NEUTRAL_VALUES["user"] is None
    assert not REFUSED.keys() & supported
    requests: dict[str, Any] = {
        "/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}
    }  # fmt: skip
    for path, request in requests.items():
        is_chat = "messages" in request
        for field, value in (REFUSED | {"add_special_tokens": is_chat}).items():
            response = live.post(path, **request, max_tokens=1, **{field: value})
            assert response.status_code == 400, field
            assert response.json()["error"]["param"] == field
        harmless = {field: values[0] for field, values in NEUTRAL_VALUES.items() if values and field not in supported}
        harmless.pop("guided_decoding")  # Dynamo's
        harmless["add_special_tokens"] = not is_chat
        assert live.post(path, **request, max_tokens=1, **harmless).status_code == 200
