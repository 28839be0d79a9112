# SPDX-License-Identifier: Apache-2.0
"""Target, drafter and tokenizer of an engine as a session, which makes requests and the decoders that serve them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from dflash_trt.api.completion import Completion
from dflash_trt.api.runtime_options import DEFAULTS
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.errors import RequestError
from dflash_trt.runtime.answer import completion
from dflash_trt.runtime.checked_pair import check_prompt
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.grammars.compiler import GrammarCompiler
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.logits_processors import LogitBias, LogitsProcessor, MinTokens
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.plugin_processors import AcceptanceRule, plugin_processors
from dflash_trt.runtime.policy.draft_length import DraftLength, FixedLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.targets.running_model import HuggingFaceTarget

LOG = logging.getLogger("dflash_trt.runtime")
WARM_UP_TOKENS = 8


@dataclass(eq=False)
class Session:
    """Target, drafter and tokenizer of one engine directory.

    One decoder at a time may use them: a new one begins when all requests of the one before have ended, and shares
    none of its pages. The same holds for sessions that share a target.
    """

    manifest: Manifest
    target: HuggingFaceTarget
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase | None
    stop_ids: frozenset[int]
    """End-of-sequence tokens of the target."""
    max_batch_size: int = field(default=1, kw_only=True)
    cache_gib: float = field(default=DEFAULTS.cache_gib, kw_only=True)
    acceptance_rule: AcceptanceRule | None = field(default=None, kw_only=True)
    """A plug-in's rule; None for the exact one."""

    def allocate(self) -> None:
        """Takes a GPU's memory for all requests at their longest, or for `cache_gib`; torch.OutOfMemoryError."""
        pages = self.max_batch_size * num_pages_for(self.max_length)
        for cache in (self.target, self.drafter):
            cache.allocate(min(pages, self._num_tokens // TOKENS_PER_PAGE))

    def close(self) -> None:
        """Frees both models and their caches at once, a GPU's memory for other programs, too; no decoder may step."""
        device = self.drafter.executor.device
        with suppress(torch.AcceleratorError):  # error of a failed kernel, which ended the decoder
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.drafter.close()
        self.target.close()
        with suppress(torch.AcceleratorError):
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def with_drafter(self, manifest: Manifest, drafter: Drafter) -> Session:
        """Session that shares this one's target, with the drafter of another engine."""
        return replace(self, manifest=manifest, drafter=drafter)

    def request(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_progress: Callable[[Request], None] | None = None
    ) -> Request:
        """Request that this session can serve to its last token; RequestError for any other."""
        self.check(prompt_ids, params.max_tokens)
        if params.n != 1:
            raise RequestError(f"n: expected 1 in a stream, found {params.n}", hint="generate answers a prompt n times")
        most = self.manifest.draft.num_draft_tokens
        if params.draft_length is not None and params.draft_length > most:
            raise RequestError(f"draft_length: expected 0 to {most}, found {params.draft_length}")
        if params.min_tokens > params.max_tokens:
            expected = f"at most max_tokens, {params.max_tokens}"
            raise RequestError(f"min_tokens: expected {expected}, found {params.min_tokens}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: expected a target with a tokenizer, found none")
        stop_ids = params.stop_ids if params.ignore_eos else self.stop_ids
        if not params.ignore_eos and params.stop_ids:
            stop_ids |= params.stop_ids
        return Request(
            prompt_ids=[int(token) for token in prompt_ids],
            params=params,
            sampler=params.sampler(),
            processors=self._processors(params, stop_ids),
            stop_ids=stop_ids,
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop_texts, params.min_tokens),
            on_progress=on_progress,
        )

    def _processors(self, params: SamplingParams, stop_ids: Iterable[int]) -> list[LogitsProcessor]:
        processors: list[LogitsProcessor] = []
        vocab_size = self.manifest.target.vocab_size
        if params.min_tokens and (early := [token for token in stop_ids if token < vocab_size]):
            processors.append(MinTokens(params.min_tokens, early))
        if params.logit_bias:
            if (largest := max(params.logit_bias)) >= vocab_size:
                raise RequestError(f"logit_bias: expected token ids from 0 to {vocab_size - 1}, found {largest}")
            processors.append(LogitBias(params.logit_bias))
        if params.structured_outputs is not None:
            processors.append(self.grammars.processor(params.structured_outputs))
        processors += plugin_processors(params, vocab_size)
        return processors if self.acceptance_rule is None else [*processors, self.acceptance_rule]

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars over the target's vocabulary; RequestError where there can be none."""
        return GrammarCompiler(self.tokenizer, self.manifest.target.vocab_size, self.stop_ids)

    def decoder(
        self, policy: DraftLength | None = None, *, prefill_chunk: int = DEFAULTS.prefill_chunk,
        prefix_caching: bool = False, max_batch_size: int | None = None,
    ) -> Decoder:  # fmt: skip
        """Decoder with the drafter; it verifies all drafts and takes the session's batch size unless told otherwise.

        With `prefix_caching` a prompt begins with what earlier ones left in the caches, where the target keeps it.
        """
        policy = policy or FixedLength(self.manifest.draft.num_draft_tokens)
        is_plain = isinstance(policy, FixedLength) and policy.length == 0
        if prefix_caching and not self.target.keeps_prefixes:
            LOG.warning("prefix caching is off: the target's state is not kept in pages")
            prefix_caching = False
        slots = SlotPool(max_batch_size or self.max_batch_size, self._num_tokens, prefix_caching=prefix_caching)
        runner = ModelRunner(self.target, None if is_plain else self.drafter)
        return Decoder(runner, slots, policy, prefill_chunk=prefill_chunk)

    def plain_decoder(self) -> Decoder:
        """Decoder without the drafter, one token a pass."""
        return self.decoder(FixedLength(0))

    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Decodes one prompt with the drafter."""
        return run(self.decoder(), [self.request(prompt_ids, params)])[0]

    def generate_plain(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Decodes one prompt without the drafter."""
        return run(self.plain_decoder(), [self.request(prompt_ids, params)])[0]

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        """Runs both ways of decoding for a few tokens, so that neither pays for being first."""
        params = SamplingParams(max_tokens=WARM_UP_TOKENS)
        self.generate(prompt_ids, params)
        self.generate_plain(prompt_ids, params)

    def check(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Raises RequestError for a prompt that cannot be served to its last token."""
        check_prompt(prompt_ids, max_tokens, self.manifest.draft, self.manifest.target)
        length = len(prompt_ids) + max_tokens
        if length > self._num_tokens:
            holder, hint = f"{self.cache_gib:g} GiB of cache hold", "give the caches more room with --cache-gib"
            if self._num_tokens == self.drafter.cache.max_tokens:
                holder, hint = "the draft's plans hold", "build plans with a larger --max-seq-len or --max-batch-size"
            raise RequestError(
                f"prompt: expected at most {self._num_tokens} tokens, which is what {holder},"
                f" found {len(prompt_ids)} in the prompt + {max_tokens} new ones = {length}",
                hint=hint,
            )

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.manifest.target.max_position_embeddings, self._num_tokens)

    @cached_property
    def _num_tokens(self) -> int:
        """Tokens that fill whole pages of both caches, beside the target's recurrent state."""
        bytes_per_token = self.target.cache_bytes_per_token + self.drafter.cache_bytes_per_token
        room = self.cache_gib * 2**30 - self.max_batch_size * self.target.cache_bytes_per_slot
        tokens = max(0, int(room / bytes_per_token) // TOKENS_PER_PAGE * TOKENS_PER_PAGE)
        return min(tokens, self.drafter.cache.max_tokens or tokens)


def run(decoder: Decoder, requests: Sequence[Request]) -> list[Completion]:
    """Answers of a decoder to `requests`."""
    decoder.run(requests)
    return [completion(request) for request in requests]
