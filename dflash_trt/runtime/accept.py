# SPDX-License-Identifier: Apache-2.0
"""Accepts the proposals that the target would have emitted itself, and its own token after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt import _C
from dflash_trt.engine.proposals import Proposals
from dflash_trt.errors import RequestError
from dflash_trt.runtime.logprobs import Rows, add_logprobs, add_prompt_logprobs
from dflash_trt.runtime.penalties import Penalised, penalise
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import HEAVIEST, RowDraw, row_draws, sample
from dflash_trt.runtime.step_input import StepInput

NO_ROWS = range(0)
NO_LOGITS = np.empty((0, 0), dtype=np.float32)


def accept_parts(parts: Sequence[StepInput], logits: Tensor) -> list[list[int]]:
    """Tokens that the target emits for each part: accepted proposals and one more, or none inside a prompt.

    A non-finite first row yields no token; a later one only shortens the block.
    """
    if all(part.request.is_argmax and part.request.is_simple for part in parts):
        chosen, are_finite = choose(logits)
        if are_finite.all():
            return _equal_parts(parts, chosen.tolist())
    # On a CPU the compiled rule is faster than torch, and reads no row after a rejected proposal.
    on_cpu = logits.device.type == "cpu"
    ends = list(accumulate([part.num_logits for part in parts]))
    are_chosen = [not part.request.processors and (not on_cpu or part.request.is_argmax) for part in parts]
    here = _rows_here(parts, ends, are_chosen, logits)
    draws = [] if on_cpu else _draws_there(parts, ends, are_chosen, logits)
    chosen, are_finite = choose(logits, draws)
    choices, finite = chosen.tolist(), None if are_finite.all() else are_finite.tolist()
    accepted = []
    for part, end, is_chosen, rows in zip(parts, ends, are_chosen, here, strict=True):
        request, num_prompt = part.request, part.num_prompt_logits
        if num_prompt:
            add_prompt_logprobs(request, rows[:num_prompt])
            rows = rows[num_prompt:]
        begin, drafted = end - part.num_drawn, part.drafted
        if finite is not None:
            end = begin + len(list(takewhile(bool, finite[begin:end])))
            drafted, rows = drafted.first(max(0, end - begin - 1)), rows[: end - begin]
        accepted.append(accept(request, drafted, choices[begin:end], rows, is_chosen))
    return accepted


def _equal_parts(parts: Sequence[StepInput], choices: list[int]) -> list[list[int]]:
    """Accepted tokens of each part, where the target's own tokens are all that counts."""
    accepted, begin = [], 0
    for part in parts:
        place = begin
        for proposal in part.drafted.token_ids:
            if proposal != choices[place]:
                break
            place += 1
        end = begin + part.num_logits
        accepted.append(choices[begin : place + 1 if place < end else end])
        begin = end
    return accepted


def _rows_here(
    parts: Sequence[StepInput], ends: Sequence[int], are_chosen: Sequence[bool], logits: Tensor
) -> Iterable[Rows]:
    """Rows of each part that are needed in the host's memory: those that tokens are drawn from, and the prompt's."""
    places = [
        NO_ROWS
        if is_chosen and not part.num_prompt_logits and not part.request.params.logprobs
        else range(end - part.num_logits, end)
        for part, end, is_chosen in zip(parts, ends, are_chosen, strict=True)
    ]
    return rows_here(logits, places) if any(places) else repeat(NO_LOGITS, len(parts))


def _draws_there(
    parts: Sequence[StepInput], ends: Sequence[int], are_chosen: Sequence[bool], logits: Tensor
) -> list[RowDraw]:
    """Penalises logits on a device, and lists the draws of tokens that are no argmax."""
    penalised, draws = list[Penalised](), list[RowDraw]()
    for part, end, is_chosen in zip(parts, ends, are_chosen, strict=True):
        request, rows = part.request, range(end - part.num_drawn, end)
        if not is_chosen or request.is_argmax or not rows:
            continue
        if request.params.penalizes:
            proposals = part.drafted.token_ids
            penalised.append(Penalised(rows, request.sampler, request.prompt_ids, request.token_ids, proposals))
        if request.params.temperature > 0:
            draws += row_draws(request.sampler, len(request.token_ids), rows, part.drafted, logits.shape[-1])
    penalise(logits, penalised)
    return draws


def accept(request: Request, proposals: Proposals, choices: list[int], rows: Rows, is_chosen: bool) -> list[int]:
    """Accepted proposals and one token more; [] without logits, that is inside a prompt.

    choices [n] are the target's own tokens after the last token and each proposal, if `is_chosen`: the argmax, or drawn
    with the random number of each position. Proposals equal to them are accepted: the exact rule of speculative
    sampling (docs/sampling.md). Other tokens are chosen or drawn by rows [n, V] of logits. Drawn proposals are judged
    by rejection sampling, here or by `choices`.
    """
    if not choices:
        return []
    params, processed = request.params, rows
    if request.processors:
        processed, choices = _process(request, proposals.token_ids, rows)
        proposals = proposals.first(max(0, len(choices) - 1))
        if not choices:
            return []
    if is_chosen or request.is_argmax:
        token_ids = choices[: num_equal(proposals.token_ids, choices) + 1]
    else:
        before, after = (_ids(request.prompt_ids), _ids(request.token_ids)) if params.penalizes else (None, None)
        token_ids = _C.verify_block(
            processed, proposals.token_ids, request.sampler, len(request.token_ids), before, after,
            proposals.candidate_ids, proposals.probabilities,
        )  # fmt: skip
    for processor in request.processors:
        processor.advance(token_ids)
    if params.logprobs:
        add_logprobs(request, rows, token_ids)
    return token_ids


def _process(request: Request, proposals: Sequence[int], rows: Rows) -> tuple[Rows, list[int]]:
    """Rows [n, V] as the request's processors change them, and their argmax, up to a row that rules all tokens out."""
    rows = rows.copy()
    try:
        for processor in request.processors:
            processor.process(rows, proposals)
    except RequestError as error:
        request.error = error
        return rows[:0], []
    greedy = rows.argmax(axis=-1)
    is_finite = np.isfinite(rows[np.arange(len(rows)), greedy])
    count = len(rows) if is_finite.all() else int(is_finite.argmin())
    if count == 0:
        request.error = RequestError("structured_outputs: expected a grammar that leaves a token to draw, found none")
    return rows[:count], greedy[:count].tolist()


def num_equal(proposals: Sequence[int], choices: Sequence[int]) -> int:
    """Length of the longest prefix of proposals [K] that equals the target's own choices [K + 1]."""
    assert len(choices) == len(proposals) + 1, "a choice after the anchor and after each proposal"
    return next((i for i, (a, b) in enumerate(zip(proposals, choices, strict=False)) if a != b), len(proposals))


def _ids(token_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(token_ids, dtype=np.int64)


def choose(logits: Tensor, draws: Sequence[RowDraw] = ()) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The target's own token [n] by each row of logits [n, V], and whether the row is finite.

    On a GPU, tokens of the rows that `draws` name are sampled. All others are the argmax, in which a NaN is largest.
    Waits for a GPU once, and again where a filter leaves many tokens.
    """
    if logits.device.type == "cpu":
        rows = _numpy(logits)
        tokens = rows.argmax(axis=-1)
        return tokens, np.isfinite(rows.take(tokens + np.arange(0, rows.size, rows.shape[1])))
    best, chosen = logits.max(dim=-1)
    for heaviest in (HEAVIEST, logits.shape[-1]):
        sample(logits, best, draws, chosen, heaviest)
        choices, finite = torch.stack([chosen, best.isfinite().to(chosen.dtype)]).cpu().numpy()
        draws = [draw for draw in draws if choices[draw.row] < 0]
        if not draws:
            break
    return choices, finite.astype(bool)


def _numpy(logits: Tensor) -> Rows:
    """NumPy finds an argmax in a third to a fifth of torch's time (2.13), and has no BF16."""
    rows: Rows = logits.float().numpy()
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
