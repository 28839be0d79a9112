# SPDX-License-Identifier: Apache-2.0
"""Accepts the proposals that the target would have emitted itself, and its own token after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import msgspec
import numpy as np
import torch
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


class _Block(msgspec.Struct, frozen=True):
    """Part of a step, and its logits."""

    part: StepInput
    rows: range
    """Rows that tokens are drawn from; those for the prompt lie before them."""
    is_chosen: bool
    """Whether tokens are chosen where the logits lie; else they are by rows in the host's memory."""

    @property
    def rows_here(self) -> range:
        """Rows that are needed in the host's memory."""
        num_prompt_logits = self.part.num_prompt_logits
        if self.is_chosen and num_prompt_logits == 0 and not self.part.request.params.logprobs:
            return NO_ROWS
        return range(self.rows.start - num_prompt_logits, self.rows.stop)

    @property
    def penalised(self) -> Penalised | None:
        """History that the chosen tokens depend on."""
        request = self.part.request
        if not (self.is_chosen and self.rows and request.params.penalizes):
            return None
        return Penalised(self.rows, request.sampler, request.prompt_ids, request.token_ids, self.part.proposals)

    def draws(self, vocab_size: int) -> Iterable[RowDraw]:
        """Draws of the chosen tokens that are no argmax."""
        request = self.part.request
        if not self.is_chosen or request.params.temperature == 0:
            return ()
        return row_draws(request.sampler, len(request.token_ids), self.rows, self.part.drafted, vocab_size)


def _blocks(parts: Sequence[StepInput], *, on_cpu: bool) -> Iterator[_Block]:
    """On a CPU the compiled rule is faster than torch, and reads no row after a rejected proposal."""
    end = 0
    for part in parts:
        request, params = part.request, part.request.params
        is_argmax = params.temperature == 0 and not params.penalizes
        is_chosen = not request.processors and (is_argmax or not on_cpu)
        end += part.num_prompt_logits + part.num_logits
        yield _Block(part, range(end - part.num_logits, end), is_chosen)


def accept_parts(parts: Sequence[StepInput], logits: Tensor) -> list[list[int]]:
    """Tokens that the target emits for each part: accepted proposals and one more, or none inside a prompt.

    A non-finite first row yields no token; a later one only shortens the block.
    """
    on_cpu = logits.device.type == "cpu"
    blocks = list(_blocks(parts, on_cpu=on_cpu))
    here, draws = rows_here(logits, [block.rows_here for block in blocks]), list[RowDraw]()
    if not on_cpu:
        penalise(logits, [penalised for block in blocks if (penalised := block.penalised)])
        draws += [draw for block in blocks for draw in block.draws(logits.shape[-1])]
    choices, finite = choose(logits, draws)
    all_finite = all(finite)
    accepted = []
    for block, rows in zip(blocks, here, strict=True):
        part, begin = block.part, block.rows.start
        if part.num_prompt_logits:
            add_prompt_logprobs(part.request, rows[: part.num_prompt_logits])
        count = part.num_logits if all_finite else len(list(takewhile(bool, finite[begin : block.rows.stop])))
        proposals, rows = part.drafted.first(max(0, count - 1)), rows[part.num_prompt_logits :][:count]
        accepted.append(accept(part.request, proposals, choices[begin : begin + count], rows, block.is_chosen))
    return accepted


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
    if is_chosen or (params.temperature == 0 and not params.penalizes):
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


def num_equal(proposals: Sequence[int], greedy: Sequence[int]) -> int:
    """Length of the longest prefix of proposals [K] that equals the target's own choices, greedy [K + 1]."""
    assert len(greedy) == len(proposals) + 1, "a choice after the anchor and after each proposal"
    return next((i for i, (a, b) in enumerate(zip(proposals, greedy, strict=False)) if a != b), len(proposals))


def _ids(token_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(token_ids, dtype=np.int64)


def choose(logits: Tensor, draws: Sequence[RowDraw] = ()) -> tuple[list[int], list[bool]]:
    """The target's own token [n] by each row of logits [n, V], and whether the row is finite.

    On a GPU, tokens of the rows that `draws` name are sampled. All others are the argmax, in which a NaN is largest.
    Waits for a GPU once, and again where a filter leaves many tokens.
    """
    if logits.device.type == "cpu":
        rows = _numpy(logits)
        tokens = rows.argmax(axis=-1)
        return tokens.tolist(), np.isfinite(rows[np.arange(len(rows)), tokens]).tolist()
    best, chosen = logits.max(dim=-1)
    for heaviest in (HEAVIEST, logits.shape[-1]):
        sample(logits, best, draws, chosen, heaviest)
        choices, finite = torch.stack([chosen, best.isfinite().to(chosen.dtype)]).tolist()
        draws = [draw for draw in draws if choices[draw.row] < 0]
        if not draws:
            break
    return choices, [bool(number) for number in finite]


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
