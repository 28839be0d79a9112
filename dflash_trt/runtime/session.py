# SPDX-License-Identifier: Apache-2.0
"""Target, drafter and tokenizer, loaded: what makes requests, and decoders that serve them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_trt.api.completion import Completion, completion
from dflash_trt.api.prompts import check_prompt, max_positions
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.api.tokenizer import encode, encode_chat
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import MissingDependencyError, RequestError, cut
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.decoder import CacheOwner, Decoder
from dflash_trt.runtime.draft_length import DraftLength, FixedLength, parse_draft_length
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.kvcache.page_table import TOKENS_PER_PAGE
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.logits_processors import GrammarCompiler, LogitBias, LogitsProcessor
from dflash_trt.runtime.model_runner import LocalRunner, ModelRunner
from dflash_trt.runtime.open_backend import CheckedPair, default_batch_size
from dflash_trt.runtime.ranks.parallel_runner import TensorParallelRunner, follow, rank_facts
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.dtype import target_dtype
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.sharding import sharding
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("dflash_trt.runtime")
WARM_UP_TOKENS = 8


class Session:
    """Target, drafter and tokenizer of one engine directory; one decoder at a time may use them.

    As a decoder admits a request, what runs on another of the session, abandoned or not, is cancelled.
    """

    def __init__(
        self,
        manifest: Manifest,
        target: HuggingFaceTarget,
        drafter: Drafter,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: frozenset[int],
        *,
        num_slots: int = 1,
        cache_gib: float = DEFAULTS.cache_gib,
        ranks: Leader | Follower | None = None,
        cache_owner: CacheOwner | None = None,
    ) -> None:
        """`stop_ids` are the target's end-of-sequence tokens; `ranks` share the target with this process.

        `cache_owner` is that of sessions with the same target.
        """
        self.ranks = ranks
        self.manifest = manifest
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.num_slots = num_slots
        self.cache_gib = cache_gib
        self._cache_owner = cache_owner or CacheOwner()

    def with_drafter(self, manifest: Manifest, drafter: Drafter) -> Session:
        """A session that shares this one's target, with the drafter of another engine with `manifest`."""
        return Session(
            manifest,
            self.target,
            drafter,
            self.tokenizer,
            self.stop_ids,
            num_slots=self.num_slots,
            cache_gib=self.cache_gib,
            cache_owner=self._cache_owner,
        )

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt, taken as it is or wrapped in the target's chat template."""
        assert self.tokenizer is not None
        return encode(self.tokenizer, prompt, chat=chat)

    def encode_chat(self, messages: object) -> list[int]:
        """Token ids of a conversation in the target's chat template."""
        assert self.tokenizer is not None
        return encode_chat(self.tokenizer, messages)

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_progress: Callable[[Request], None] | None = None,
    ) -> Request:
        """A request that this session can serve to its last token; RequestError for any other."""
        self.check(prompt_ids, params.max_tokens)
        if params.n != 1:
            raise RequestError(f"n: expected 1 in a stream, found {params.n}", hint="generate answers a prompt n times")
        check_draft_length(params, self.manifest.draft.num_draft_tokens)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: expected a target with a tokenizer, found none")
        return Request(
            prompt_ids=[int(token) for token in prompt_ids],
            params=params,
            sampler=params.sampler(),
            processors=self._processors(params),
            stop_ids=params.stop_ids | (frozenset() if params.ignore_eos else self.stop_ids),
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop_texts),
            on_progress=on_progress,
        )

    def _processors(self, params: SamplingParams) -> list[LogitsProcessor]:
        processors: list[LogitsProcessor] = []
        if params.logit_bias:
            if (largest := max(params.logit_bias)) >= (vocab_size := self.manifest.target.vocab_size):
                raise RequestError(f"logit_bias: expected token ids from 0 to {vocab_size - 1}, found {largest}")
            processors.append(LogitBias(params.logit_bias))
        if params.structured_outputs is not None:
            processors.append(self.grammars.processor(params.structured_outputs))
        return processors

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Over the target's vocabulary; RequestError where there can be none."""
        return GrammarCompiler(self.tokenizer, self.manifest.target.vocab_size, self.stop_ids)

    def decoder(
        self,
        draft_length: DraftLength | None = None,
        *,
        prefill_chunk: int = DEFAULTS.prefill_chunk,
        prefix_caching: bool = False,
        num_slots: int | None = None,
    ) -> Decoder:
        """Decodes with the drafter, by default verifying all it proposes, in `num_slots` or all of its slots.

        With `prefix_caching` a prompt begins with what earlier ones left in the caches, where the target keeps it.
        """
        length = draft_length or FixedLength(self.manifest.draft.num_draft_tokens)
        is_plain = isinstance(length, FixedLength) and length.length == 0
        if prefix_caching and not self.target.keeps_prefixes:
            LOG.warning("prefix caching is off: the target's state is not kept in pages")
            prefix_caching = False
        slots = SlotPool(num_slots or self.num_slots, self._num_tokens, prefix_caching=prefix_caching)
        return Decoder(
            self._pair(int(is_plain)), slots, length, prefill_chunk=prefill_chunk, cache_owner=self._cache_owner
        )

    def plain_decoder(self) -> Decoder:
        """Decodes without the drafter, one token a pass."""
        return self.decoder(FixedLength(0))

    def follow(self) -> None:
        """Decodes what rank 0 decodes, until it has finished; for the other ranks."""
        assert isinstance(self.ranks, Follower)
        follow(self.ranks, self._local_pairs())

    def _pair(self, index: int) -> ModelRunner:
        local = self._local_pairs()[index]
        if self.ranks is None or self.ranks.size == 1:
            return local
        assert isinstance(self.ranks, Leader), "only rank 0 decides"
        return TensorParallelRunner(self.ranks, local, index)

    def _local_pairs(self) -> tuple[LocalRunner, LocalRunner]:
        """With the drafter, and without."""
        return LocalRunner(self.target, self.drafter), LocalRunner(self.target, None)

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
            raise RequestError(
                f"prompt: expected at most {self._num_tokens} tokens, which is what {self.cache_gib:g} GiB of cache"
                f" hold, found {len(prompt_ids)} in the prompt + {max_tokens} new ones = {length}",
                hint="give the caches more room with --cache-gib",
            )

    @property
    def max_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(max_positions(self.manifest.draft, self.manifest.target), self._num_tokens)

    @property
    def _num_tokens(self) -> int:
        """Tokens that whole pages of target and drafter may hold in all, beside the target's recurrent state."""
        bytes_per_token = self.target.cache_bytes_per_token + self.drafter.cache_bytes_per_token
        room = self.cache_gib * 2**30 - self.num_slots * self.target.cache_bytes_per_slot
        return max(0, int(room / bytes_per_token) // TOKENS_PER_PAGE * TOKENS_PER_PAGE)


def run(decoder: Decoder, requests: Sequence[Request]) -> list[Completion]:
    """The answers of a decoder to `requests`."""
    decoder.run(requests)
    return [completion(request) for request in requests]


def check_draft_length(params: SamplingParams, num_draft_tokens: int) -> None:
    """Raises RequestError where more is asked for than the drafter proposes."""
    if params.draft_length is not None and params.draft_length > num_draft_tokens:
        raise RequestError(f"draft_length: expected 0 to {num_draft_tokens}, found {params.draft_length}")


LOG = logging.getLogger("dflash_trt.runtime")
NEW_LINE = "\n"


def open_session(engine: Path, target_name: str, options: RuntimeOptions = DEFAULTS) -> Session:
    """Reads and loads both; raises what `CheckedPair.read` and `load_session` raise."""
    return load_session(CheckedPair.read(engine, target_name), options)


def load_session(
    pair: CheckedPair,
    options: RuntimeOptions = DEFAULTS,
    *,
    expose: Sequence[str] = (),
    ranks: Leader | Follower | None = None,
) -> Session:
    """Loads both models of a pair; on many `ranks`, a shard of the target.

    `expose` names values inside draft.onnx that the drafter can return besides its hidden states.

    Raises MissingDependencyError when nothing here computes on the options' device, RequestError for a draft length or
    a number of requests that this pair cannot have, EngineError and CheckpointError for what only shows as the models
    are loaded.
    """
    manifest, checkpoint, dtype = pair.manifest, pair.target, options.dtype
    parse_draft_length(options.draft_length, manifest.draft.num_draft_tokens)
    target_dtype(dtype, checkpoint.directory, checkpoint.weights)  # what is wrong is said before the drafter loads
    device = choose_device(options.device)
    sharded: dict[str, object] = {}
    if ranks is not None and ranks.size > 1:
        ranks.verify_same_facts({**rank_facts(pair.engine, checkpoint), "dtype": dtype})
        sharded["distributed_config"] = sharding(checkpoint.directory, ranks.size)
        device = this_rank(device)
    num_slots = options.max_batch_size or default_batch_size(manifest)
    with room_for(num_slots):
        drafter = open_drafter(pair.engine, manifest, num_slots=num_slots, device=device, expose=expose)

    taps = manifest.draft.target_layer_ids
    num_ranks = ranks.size if ranks else 1
    model = load_model(checkpoint.directory, checkpoint.spec, taps, dtype=dtype, num_ranks=num_ranks, **sharded)
    if not sharded:  # transformers puts shards where they belong
        model = model.to(device)
    target = make_target(model, taps, num_slots, accelerate)
    if model.dtype == torch.bfloat16 and not target.is_batch_invariant:
        LOG.warning(
            "%s in bfloat16: here a block rounds otherwise than one token a pass, so near-ties may fall another way"
            " than in plain decoding; --dtype float32 avoids that",
            checkpoint.directory,
        )
    return Session(
        manifest,
        target,
        drafter,
        pair.tokenizer,
        stop_token_ids(model),
        num_slots=num_slots,
        cache_gib=options.cache_gib,
        ranks=ranks,
    )


@contextmanager
def room_for(num_slots: int) -> Iterator[None]:
    """RequestError where torch finds no memory for caches of so many requests."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise RequestError(
            f"max_batch_size: expected memory for the caches of {num_slots} requests, found too little"
            f" ({cut(str(error).partition(NEW_LINE)[0])})",
            hint="lower max_batch_size",
        ) from None


def this_rank(device: str) -> str:
    """The rank's own GPU, which `join` has made torch's current one."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def choose_device(device: str) -> str:
    """What `device` comes to, "cpu" or "cuda"; MissingDependencyError for a CUDA device that torch does not see."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise MissingDependencyError(
            f"device: expected a CUDA device, found none that torch {torch.__version__} sees",
            hint="install a CUDA build of torch, or decode with --device cpu",
        )
    return "cuda" if has_cuda and device != "cpu" else "cpu"
