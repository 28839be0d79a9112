# SPDX-License-Identifier: Apache-2.0
"""Reports of a request: chunks while its answer grows, and the Completion that it ends as."""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion, FinishReason, PromptLogprobs
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.request import Request, steps_of

Put = Callable[[Chunk | Exception], None]


def chunk_reporter(put: Put, incremental: bool) -> Callable[[Request], None]:
    """Listener that puts what each report adds, or all of it at the end."""
    sent = num_passes = 0

    def on_progress(request: Request) -> None:
        nonlocal sent, num_passes
        if not incremental and request.finished is None:
            return
        new, passes = slice(sent, len(request.answer)), request.answer.passes(num_passes)
        text = "" if request.text is None else request.text.next_text()
        try:
            chunk = Chunk(
                text=text,
                token_ids=request.answer.token_ids(sent),
                logprobs=request.logprobs[new] if request.params.logprobs else None,
                top_logprobs=request.top_logprobs[new] if request.params.top_logprobs else None,
                prompt_logprobs=prompt_logprobs(request) if sent == 0 else None,
                steps=steps_of(passes[num_passes == 0 :]),  # without the prefill's
                emitted=[time for time, *_ in passes],
                completion=None if request.finished is None else completion(request),
            )
        except (EngineError, RequestError) as error:
            put(error)
        else:
            put(chunk)
        sent, num_passes = new.stop, num_passes + len(passes)

    return on_progress


def completion(request: Request) -> Completion:
    """The answer of a request that has ended; raises its own error, EngineError where the decoder failed."""
    assert request.finished is not None
    if request.error is not None:
        if request.finished is FinishReason.ERROR:
            raise request.error
        raise EngineError(f"the decoder has failed: {request.error}") from request.error
    assert request.ended is not None
    tokens, passes = len(request.answer), request.answer.passes()
    first, last = (passes[0][0], passes[-1][0]) if passes else (None, None)
    return Completion(
        token_ids=request.token_ids,
        prompt_token_ids=list(request.prompt_ids),
        text="" if request.text is None else request.text.text,
        finish_reason=request.finished,
        stop_reason=_stop_reason(request),
        logprobs=list(request.logprobs) if request.params.logprobs else None,
        top_logprobs=list(request.top_logprobs) if request.params.top_logprobs else None,
        prompt_logprobs=prompt_logprobs(request),
        cumulative_logprob=sum(request.logprobs) if request.params.logprobs else None,
        seed=request.sampler.seed,
        acceptance=Acceptance.of(steps_of(passes[1:])),
        arrived=request.arrived,
        queue_seconds=(request.admitted or request.ended) - request.arrived,
        ttft_seconds=None if first is None else first - request.arrived,
        itl_seconds=(last - first) / (tokens - 1) if first is not None and last is not None and tokens > 1 else None,
        seconds=request.ended - request.arrived,
        num_cached_tokens=request.num_cached_tokens,
    )


def prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """Log probabilities of a prompt that has been read; None unless requested."""
    if not request.params.prompt_logprobs:
        return None
    top = list(request.prompt_top_logprobs) if request.params.top_logprobs else None
    return PromptLogprobs(logprobs=list(request.prompt_logprobs), top_logprobs=top)


def _stop_reason(request: Request) -> str | int | None:
    if request.finished is not FinishReason.STOP:
        return None
    if request.text is not None and request.text.stopped_by is not None:
        return request.text.stopped_by
    last = request.token_ids[-1]
    return last if last in request.params.stop_ids else None
