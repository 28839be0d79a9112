# SPDX-License-Identifier: Apache-2.0
"""Makes chunks of what a request reports while its answer grows."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.api.backend import Chunk
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.answer import completion, prompt_logprobs
from dflash_trt.runtime.request import Request

Put = Callable[[Chunk | Exception], None]


def chunk_reporter(put: Put, incremental: bool) -> Callable[[Request], None]:
    """Listener that puts what each report adds, or all of it at the end."""
    sent = sent_steps = sent_times = 0

    def on_progress(request: Request) -> None:
        nonlocal sent, sent_steps, sent_times
        if not incremental and request.finished is None:
            return
        new = slice(sent, len(request.token_ids))
        steps, emitted = request.steps[sent_steps:], request.emitted[sent_times:]
        text = "" if request.text is None else request.text.next_text()
        try:
            chunk = Chunk(
                text=text,
                token_ids=request.token_ids[new],
                logprobs=request.logprobs[new] if request.params.logprobs else None,
                top_logprobs=request.top_logprobs[new] if request.params.top_logprobs else None,
                prompt_logprobs=prompt_logprobs(request) if sent == 0 else None,
                steps=steps,
                emitted=emitted,
                completion=None if request.finished is None else completion(request),
            )
        except (EngineError, RequestError) as error:
            put(error)
        else:
            put(chunk)
        sent, sent_steps, sent_times = new.stop, sent_steps + len(steps), sent_times + len(emitted)

    return on_progress
