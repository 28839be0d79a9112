# SPDX-License-Identifier: Apache-2.0
"""Acceptance without the target: the greedy decode loop, walked along answers that `capture` recorded.

It is the loop that serves (`Decoder`, `LocalRunner`), with a target that says what was recorded: the steps are those of
decoding wherever the taps are. No model is loaded; a file has its lm_head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
import torch.nn.functional as F

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.measure.features import FeatureFile, FeatureSequence, PromptFacts
from dflash_trt.runtime.model_runner import LocalRunner
from dflash_trt.runtime.request import Request, Step
from dflash_trt.runtime.targets.target import Segment, Target, Verified

BATCH_SIZE = 8
"""Sequences at once. More fill the CPU no better, and each holds its taps."""
PREFILL_CHUNK = 4096
"""Prompt tokens a step: nobody waits for the others' prompts here."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding one prompt with the drafter comes to."""

    prompt: PromptFacts
    num_prompt_tokens: int
    num_output_tokens: int
    steps: list[Step]
    """The verify passes; the prefill, which emits the first token, is none."""

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verify pass, as in `Completion`; None without one."""
        return Acceptance.of(self.steps).tau


def replay(
    features: FeatureFile,
    drafter: Drafter,
    *,
    numbers: Sequence[int] | None = None,
    draft_length: int | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """What greedy decoding of the captured prompts with `drafter` does, step by step, in the order of `numbers`.

    `numbers`: all by default. `draft_length`: how many proposals a pass verifies, K by default. As many run at once as
    the drafter has slots, which must be empty. Raises CheckpointError for impossible values in the file.
    """
    chosen = range(features.facts.num_sequences) if numbers is None else numbers
    requests = [_request(features, i, on_prompt) for i in chosen]
    num_slots = len(drafter.cache.lengths)
    longest = max((request.max_length for request in requests), default=0)
    length = FixedLength(drafter.spec.num_draft_tokens if draft_length is None else draft_length)
    pair = LocalRunner(RecordedTarget(features, chosen), drafter)
    decoder = Decoder(pair, SlotPool.for_each_slot(num_slots, longest), length, prefill_chunk=PREFILL_CHUNK)
    decoder.run(requests)
    return [
        Replayed(
            prompt=features.facts.prompts[i],
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.token_ids),
            steps=request.steps,
        )
        for i, request in zip(chosen, requests, strict=True)
    ]


def _request(features: FeatureFile, i: int, on_prompt: Callable[[], None]) -> Request:
    params = SamplingParams(max_tokens=features.facts.max_tokens)
    request = Request(
        prompt_ids=features.prompt(i).tolist(),
        params=params,
        sampler=params.sampler(),
        stop_ids=frozenset(features.facts.stop_token_ids),
    )
    request.on_progress = lambda request: on_prompt() if request.finished else None
    return request


@dataclass(slots=True)
class _RecordedPosition:
    """Where a slot stands in its sequence."""

    sequence: FeatureSequence
    length: int = 0
    """Tokens that the slot holds."""


class RecordedTarget(Target):
    """A `Target` on a feature file. Each slot that begins takes the next sequence, as the decode loop admits requests.

    Its logits are 1 for the recorded token and 0 for all others; behind the end, and after another token, they and the
    taps mean nothing, and the loop reads neither.
    """

    def __init__(self, file: FeatureFile, numbers: Sequence[int]) -> None:
        """`numbers`: of the sequences, in the order in which slots take them."""
        self._file = file
        self._numbers = iter(numbers)
        self._places: dict[int, _RecordedPosition] = {}
        self._token_ids, self._table = _embeddings(file)

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """What was recorded for the segments' rows."""
        logits, taps = [], []
        for segment in segments:
            if segment.slot not in self._places:
                self._places[segment.slot] = _RecordedPosition(self._file.sequence(next(self._numbers)))
            place = self._places[segment.slot]
            begin, end = place.length, place.length + len(segment.token_ids)
            _check(place.sequence, segment, begin)
            logits.append(self._logits(place.sequence, end - segment.num_logits, end))
            taps.append(_rows(place.sequence.taps, begin, end))
            place.length = end
        return Verified(logits=torch.cat(logits), tapped=[torch.cat(taps)] if with_taps else ())

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Takes the slot's last tokens back."""
        self._places[slot].length -= num_tokens

    def release(self, slot: int) -> None:
        """Lets go of the slot's sequence."""
        del self._places[slot]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Recorded embeddings [..., H] FLOAT of mask tokens and of tokens that are in an answer."""
        rows = torch.searchsorted(self._token_ids, token_ids).clamp(max=len(self._token_ids) - 1)
        assert torch.equal(self._token_ids[rows], token_ids), "a token that no answer holds"
        return self._table[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The recorded lm_head's logits [..., V]."""
        weight, bias = self._head
        return F.linear(hidden.to(weight.dtype), weight, bias)

    @cached_property
    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """In the target's type; a draft with a head of its own never asks."""
        weight, bias = self._file.lm_head()
        dtype = getattr(torch, self._file.facts.target_dtype)
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def _logits(self, sequence: FeatureSequence, begin: int, end: int) -> torch.Tensor:
        """[end - begin, V]: 1 for the token after each of the positions."""
        logits = torch.zeros(end - begin, self._file.facts.target.vocab_size)
        following = sequence.tokens[begin + 1 : end + 1]
        logits[torch.arange(len(following)), following] = 1
        return logits


def _check(sequence: FeatureSequence, segment: Segment, begin: int) -> None:
    """A prompt's chunk and a block's first token are recorded ones; what follows in a block is proposed."""
    num_recorded = len(segment.token_ids) if begin < sequence.prompt_length else 1
    expected = sequence.tokens[begin : begin + num_recorded].tolist()
    assert list(segment.token_ids[:num_recorded]) == expected, "not the sequence that was recorded here"


def _rows(taps: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Rows begin to end, zeros behind the last."""
    rows = taps[begin:end].float()
    return F.pad(rows, (0, 0, 0, end - begin - len(rows)))


def _embeddings(file: FeatureFile) -> tuple[torch.Tensor, torch.Tensor]:
    """All token ids that the file has embeddings of, sorted [N], and these embeddings [N, H] FLOAT."""
    rows = {file.facts.mask_token_id: file.mask_embedding()}
    for i in range(file.facts.num_sequences):
        token_ids, embeddings = file.answer(i)
        rows |= dict(zip(token_ids.tolist(), embeddings, strict=True))
    ids = sorted(rows)
    return torch.tensor(ids), torch.stack([rows[token] for token in ids]).float()
