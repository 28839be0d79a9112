# SPDX-License-Identifier: Apache-2.0
"""Accepts the proposals that the target would have emitted itself, and its own token after them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt import _C
from dflash_trt.api.completion import FinishReason
from dflash_trt.engine.proposals import Proposals
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.logprobs import Rows, add_logprobs, add_prompt_logprobs
from dflash_trt.runtime.penalties import Penalised, penalise
from dflash_trt.runtime.request import NAN_HINT, Request
from dflash_trt.runtime.sampling import HEAVIEST, RowDraw, row_draws, sample
from dflash_trt.runtime.step_input import StepInput


def accept_parts(parts: Sequence[StepInput], logits: Tensor) -> list[list[int]]:
    """Tokens that the target emits for each part: accepted proposals and one more, or none inside a prompt.

    Proposals are accepted that equal the target's own token: the argmax, or the one that is drawn with the random
    number of its position, the exact rule of speculative sampling (docs/sampling.md). Proposals that were drawn are
    judged by rejection sampling. A non-finite first row yields no token; a later one only shortens the block.
    """
    proposals, num_rows = [part.drafted for part in parts], [part.num_logits for part in parts]
    read = [place for place, part in enumerate(parts) if part.num_prompt_logits or not part.request.is_simple]
    skipped, rows = [0] * len(parts), list[Rows]()
    if read:
        skipped = [part.num_logits if part.request.processors else part.num_prompt_logits for part in parts]
        rows = rows_here(logits, _places(num_rows, read))
    if logits.device.type == "cpu":
        answers = [part.request.answer for part in parts]
        accepted = _C.accept_rows(_numpy(logits), num_rows, skipped, answers, proposals)
    else:
        accepted = _C.accept_chosen(*choose(logits, _draws_there(parts, logits)), num_rows, skipped, proposals)
    for place, own in zip(read, rows, strict=True):
        accepted[place] = _read_rows(parts[place], accepted[place], own)
    return accepted


def _places(num_rows: Sequence[int], parts: Sequence[int]) -> list[range]:
    """Rows of some of the parts, which lie end to end."""
    ends = list(accumulate(num_rows))
    return [range(ends[part] - num_rows[part], ends[part]) for part in parts]


def _read_rows(part: StepInput, token_ids: list[int], rows: Rows) -> list[int]:
    """Adds the log probabilities that a request asks for, by rows [n, V] of its logits; returns its accepted tokens.

    They are `token_ids`, unless processors change the logits first.
    """
    request, num_prompt = part.request, part.num_prompt_logits
    if num_prompt:
        try:
            add_prompt_logprobs(request, rows[:num_prompt])
        except ValueError as error:  # a row that is not finite
            request.error = EngineError(f"log probabilities of the prompt: {error}", hint=NAN_HINT)
            request.ending = FinishReason.ERROR
            return []
        rows = rows[num_prompt:]
    if request.processors:
        token_ids = _accept_processed(request, part.drafted, rows)
    if request.params.logprobs:
        add_logprobs(request, rows, token_ids)
    return token_ids


def _accept_processed(request: Request, drafted: Proposals, rows: Rows) -> list[int]:
    """Accepted tokens by rows [n, V] as the request's processors change them."""
    are_finite = np.isfinite(rows.max(axis=-1, initial=-np.inf))
    rows = rows[: len(rows) if are_finite.all() else are_finite.argmin()].copy()
    if not len(rows):
        return []
    try:
        for processor in request.processors:
            processor.process(rows, drafted.token_ids[: len(rows) - 1])
    except RequestError as error:
        request.error = error
        return []
    (token_ids,) = _C.accept_rows(rows, [len(rows)], [0], [request.answer], [drafted])
    if not token_ids:
        request.error = RequestError("structured_outputs: expected a grammar that leaves a token to draw, found none")
    for processor in request.processors:
        processor.advance(token_ids)
    return token_ids


def _draws_there(parts: Sequence[StepInput], logits: Tensor) -> list[RowDraw]:
    """Penalises logits on a device, and lists the draws of tokens that are no argmax."""
    penalised, draws, end = list[Penalised](), list[RowDraw](), 0
    for part in parts:
        request, end = part.request, end + part.num_logits
        rows = range(end - part.num_drawn, end)
        if request.processors or not rows:
            continue
        if request.params.penalizes:
            penalised.append(Penalised(rows, request.sampler, request.answer, part.drafted.token_ids))
        if request.params.temperature > 0:
            draws += row_draws(request.sampler, len(request.answer), rows, part.drafted, logits.shape[-1])
    penalise(logits, penalised)
    return draws


def choose(logits: Tensor, draws: Sequence[RowDraw] = ()) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The target's own token [n] by each row of logits [n, V] on a GPU, and whether the row is finite.

    Tokens of the rows that `draws` name are sampled. All others are the argmax, in which a NaN is largest. Waits for
    the GPU once, and again where a filter leaves many tokens.
    """
    best, chosen = logits.max(dim=-1)
    for heaviest in (HEAVIEST, logits.shape[-1]):
        sample(logits, best, draws, chosen, heaviest)
        choices, finite = torch.stack([chosen, best.isfinite().to(chosen.dtype)]).cpu().numpy()
        draws = [draw for draw in draws if choices[draw.row] < 0]
        if not draws:
            break
    return choices, finite.astype(bool)


def _numpy(logits: Tensor) -> Rows:
    """Rows as NumPy has them, without BF16."""
    rows: Rows = (logits if logits.dtype == torch.float32 else logits.float()).numpy()
    return rows


def rows_here(logits: Tensor, places: Sequence[range]) -> list[Rows]:
    """Rows of logits [R, V] FLOAT at places, in the host's memory; from a GPU after the host has next waited for it.

    They come in one copy, and into pinned memory, as torch takes for a copy that is not waited for.
    """
    if logits.device.type == "cpu":
        rows = _numpy(logits)
        return [rows[place.start : place.stop] for place in places]
    chosen, lengths = [logits[place.start : place.stop] for place in places], [len(place) for place in places]
    copied = torch.cat(chosen).to("cpu", non_blocking=True) if any(lengths) else torch.empty(0, logits.shape[-1])
    return np.split(copied.numpy(), np.cumsum(lengths[:-1]))
