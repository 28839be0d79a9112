# SPDX-License-Identifier: Apache-2.0
"""A target that was recorded: it says of a captured sequence what the model said, and nothing of any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from dflash_trt.runtime.measure.features import FeatureFile, FeatureSequence
from dflash_trt.runtime.targets.target import Segment, Target, Verified


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
