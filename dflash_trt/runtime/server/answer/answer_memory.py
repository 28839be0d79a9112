# SPDX-License-Identifier: Apache-2.0
"""Memory that an answer may take before it is sent, known before it is generated.

Each constant is above what tracemalloc counts for CPython 3.11; most of it is the answer as objects, before it is
encoded as JSON.
"""

from __future__ import annotations

from dflash_trt.api.sampling_params import SamplingParams

PROMPT_TOKEN_BYTES = 128
"""Bytes of a prompt's token, which each of its answers copies."""
TOKEN_BYTES = 1024
"""Bytes of an output token, its text and its step."""
LOGPROB_BYTES = 384
"""Bytes of a token's log probability, with the token's text."""
STEP_TOKEN_BYTES = 512
"""Bytes of a token that `return_steps` lists."""


def answer_bytes(num_prompt_tokens: int, max_tokens: int, params: SamplingParams, num_step_tokens: int = 0) -> int:
    """Most bytes of one answer; `num_step_tokens` are listed for each step, of which each may emit one token."""
    logprobs = (1 + params.top_logprobs) * LOGPROB_BYTES
    per_prompt_token = PROMPT_TOKEN_BYTES + logprobs * bool(params.prompt_logprobs)
    per_token = TOKEN_BYTES + logprobs * bool(params.logprobs) + num_step_tokens * STEP_TOKEN_BYTES
    return num_prompt_tokens * per_prompt_token + max_tokens * per_token
