# SPDX-License-Identifier: Apache-2.0
"""The interface of every runtime to command line, Triton, Dynamo and HTTP server, and its metrics. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dflash_trt.api.acceptance import Acceptance, AcceptanceCounter, Step
from dflash_trt.api.completion import Completion, FinishReason, PromptLogprobs
from dflash_trt.api.sampling_params import Grammar, SamplingParams
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Totals(msgspec.Struct, kw_only=True):
    """Totals since the decoder started."""

    passes: int = 0
    """Passes of the target, prompts included."""
    finished: dict[FinishReason, int] = msgspec.field(default_factory=Counter)
    """Requests that ended, by reason."""
    output_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens of admitted requests, with prefix caching."""
    prefix_cache_hits: int = 0
    """Prompt tokens served from the prefix cache."""


class DecoderMetrics(_Totals, kw_only=True):
    """A reading of the decoder: its current state and its totals."""

    running: int
    """Requests that hold a slot."""
    waiting: int
    """Requests in the queue."""
    free_slots: int
    free_cache_tokens: int
    """Tokens that fit in the unreserved pages."""
    draft_length: str
    """Drafted tokens that a step verifies now, and the reason."""
    acceptance: Acceptance
    """Counts of all verify passes since the decoder started."""

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verify pass; None without one."""
        return self.acceptance.tau


class Counts(_Totals):
    """Running totals of one decoder."""

    acceptance: AcceptanceCounter = msgspec.field(default_factory=AcceptanceCounter)

    def add_step(self, step: Step) -> None:
        """Counts a request's verify pass."""
        self.output_tokens += len(step.token_ids)
        self.acceptance.add(step)

    def read(self) -> dict[str, Any]:
        """The current totals."""
        totals = {name: getattr(self, name) for name in _Totals.__struct_fields__}
        return totals | {"finished": dict(self.finished), "acceptance": self.acceptance.read()}


MIN_LENGTH = 2
"""Fewest tokens of a request: one of the prompt, one of the answer."""
Prompt = str | Sequence[int]
"""Text without a chat template, or token ids."""
Messages = Sequence[dict[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, ...]."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Text and tokens that one step added to an answer."""

    text: str
    """New text; a possible beginning of a stop text, or an incomplete character, is held back."""
    token_ids: list[int]
    logprobs: list[float] | None = None
    """Log probability of each token; None unless requested and known by the runtime during the answer."""
    top_logprobs: list[dict[int, float]] | None = None
    """Log probabilities of the most likely tokens at each position; None unless requested."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt, on the first chunk; None unless requested."""
    steps: list[Step] = []
    """Verify passes that emitted these tokens, after the prefill's token; empty where the runtime does not know."""
    emitted: list[float] = []
    """Times of the prefill's token and of each pass, on the clock of time.perf_counter."""
    completion: Completion | None
    """The whole answer, on the last chunk."""


class PendingAnswer(Protocol):
    """A request whose caller waits for the whole answer."""

    def submit(self) -> None:
        """Queues the request."""

    def result(self) -> Completion:
        """Waits for the answer."""

    def cancel(self) -> None:
        """Ends the request; no effect before `submit` or after its end."""


class Backend(Protocol):
    """A runtime that answers many requests at once."""

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Sequence[PendingAnswer]:
        """A request for each prompt, not submitted yet; RequestError for the first that cannot be served."""

    def stream(
        self, prompt: Prompt, params: SamplingParams, *, incremental: bool = True
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step, or in one chunk unless `incremental`; closing the iterator cancels the request.

        Submits the request at the first `anext`. Raises RequestError for an invalid one.
        """

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation; RequestError for an invalid one, or a target without a chat template."""

    def metrics(self) -> DecoderMetrics | None:
        """Current metrics; None where the runtime publishes its own."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens that one step verifies; 0 for plain decoding."""

    def close(self) -> None:
        """Cancels running requests and ends the runtime."""


class Grammars(Protocol):
    """Compiled grammars over the target's vocabulary, kept for the requests that use them."""

    @property
    def vocabulary(self) -> str:
        """The vocabulary, serialised for a process that compiles."""

    def known(self, grammar: Grammar) -> Any:
        """The compiled grammar, if it is in use or was used lately; else None."""

    def add(self, grammar: Grammar, serialized: str) -> Any:
        """Keeps a grammar that another process compiled."""


class ServedBackend(Backend, Protocol):
    """A backend for many clients, as a server needs it: it also says how much it takes, and whether it still runs.

    Only the embedded runtime can: TensorRT-LLM's executor has a server of its own.
    """

    def metrics(self) -> DecoderMetrics:
        """Current load, and totals since the start."""

    @property
    def max_batch_size(self) -> int:
        """Most requests that run at once."""

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def unscaled_length(self) -> int | None:
        """Tokens up to which the draft's RoPE is not scaled; None where it never is."""

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: not after `close`, nor after a failure."""

    @property
    def error(self) -> Exception | None:
        """The failure that ended it; None if it runs, or was closed."""

    @property
    def grammars(self) -> Grammars:
        """Compiled grammars, with which a request starts at once; RequestError where the target cannot have any."""


class PageWatcher(Protocol):
    """Listener for the pages that prompts may share."""

    def stored(self, number: int, before: int, token_ids: Sequence[int]) -> None:
        """Called for a new entry, with the tokens of its page; `before` is the entry that it follows, or ROOT."""

    def removed(self, number: int) -> None:
        """Called when an entry can no longer be found."""


class RoutedBackend(ServedBackend, Protocol):
    """A served backend behind a router, which sends a prompt to the worker whose caches hold its beginning."""

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that fit in the caches."""

    def watch_shared_pages(self, watcher: PageWatcher) -> None:
        """Calls `watcher`, on the decoder's thread, whenever a page becomes shared or stops being so."""

    def start(self, prompt: Prompt, params: SamplingParams) -> tuple[Callable[[], None], AsyncGenerator[Chunk, None]]:
        """Submits a request: what cancels it, and its chunks, which end with the last one even if it is cancelled."""


def check_room(backend: ServedBackend) -> None:
    """Raises RequestError where the caches hold less than the shortest request."""
    if backend.max_length < MIN_LENGTH:
        raise RequestError(
            f"cache_gib: expected room for at least {MIN_LENGTH} tokens, found {backend.max_length}",
            hint="give the caches more with --cache-gib",
        )


def run(
    backend: Backend,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    advance: Callable[[], object] = lambda: None,
) -> list[Completion]:
    """The answers to prompts that run together, in order; `params` has one entry for all prompts or one for each.

    Calls `advance` once for each prompt. Raises RequestError for an invalid prompt before any of them runs; Ctrl-C
    cancels all.
    """
    settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(settings) != len(prompts):
        raise RequestError(f"sampling_params: expected one for each of {len(prompts)} prompts, found {len(settings)}")
    sequences = [(prompt, each.nth(i)) for prompt, each in zip(prompts, settings, strict=True) for i in range(each.n)]
    pending = backend.prepare([prompt for prompt, _ in sequences], [each for _, each in sequences])
    try:
        for request in pending:
            request.submit()
        waiting, answers = iter(pending), []
        for prompt, each in zip(prompts, settings, strict=True):
            first, *others = [
                msgspec.structs.replace(next(waiting).result(), prompt=prompt, index=index) for index in range(each.n)
            ]
            answers.append(msgspec.structs.replace(first, others=tuple(others)))
            advance()
    except BaseException:  # Ctrl-C while waiting, above all
        for request in pending:
            request.cancel()
        raise
    return answers
