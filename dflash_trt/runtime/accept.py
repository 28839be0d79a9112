# SPDX-License-Identifier: Apache-2.0
"""Accepts the proposals that the target would have emitted itself, and its own token after them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.errors import RequestError
from dflash_trt.runtime.penalties import Penalised, penalise
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import HEAVIEST, RowDraw, row_draws, sample
from dflash_trt.runtime.targets.target import Segment

Rows = npt.NDArray[np.float32]
NO_PROPOSALS = Proposals([])
NO_ROWS = range(0)


class StepInput(msgspec.Struct, frozen=True):
    """Chunk of a request's prompt, or a block: its last token and the proposals behind it."""

    slot: int
    request: Request
    token_ids: Sequence[int]
    drafted: Proposals
    num_logits: int
    """Logits rows that tokens are drawn from."""
    num_prompt_logits: int = 0
    """Logits rows before those, for log probabilities of the prompt."""

    @property
    def proposals(self) -> Sequence[int]:
        return self.drafted.token_ids

    @property
    def segment(self) -> Segment:
        return Segment(slot=self.slot, token_ids=self.token_ids, num_logits=self.num_prompt_logits + self.num_logits)

    def num_committed(self, accepted: Sequence[int]) -> int:
        """Tokens that become context: all but the rejected proposals, given the `accepted` tokens."""
        num_accepted = max(0, len(accepted) - 1)
        return len(self.token_ids) - len(self.proposals) + num_accepted


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
    """On a CPU the compiled rule is faster than torch, and reads no row behind a rejected proposal."""
    end = 0
    for part in parts:
        request, params = part.request, part.request.params
        is_argmax = params.temperature == 0 and not params.penalizes
        is_chosen = not request.processors and (is_argmax or not on_cpu)
        end += part.num_prompt_logits + part.num_logits
        yield _Block(part, range(end - part.num_logits, end), is_chosen)


def accept_parts(parts: Sequence[StepInput], logits: Tensor) -> list[list[int]]:
    """Tokens that the target emits for each part: accepted proposals and one more, or none inside a prompt.

    A row that is not finite ends the block before it, and a part that begins with one gets no token: plain decoding
    would meet it, if at all, as the first row of a later step.
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
    with the random number of each position. What equals them is accepted: the exact rule of speculative sampling
    (docs/sampling.md). Other tokens are chosen or drawn by rows [n, V] of logits. Proposals that were drawn themselves
    are judged by rejection sampling, here or by `choices`.
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
        logprobs, top = token_logprobs(rows, token_ids, params.top_logprobs)
        request.logprobs += logprobs
        request.top_logprobs += top
    return token_ids


def add_prompt_logprobs(request: Request, rows: Rows) -> None:
    """Adds log probabilities of the next n prompt tokens, by rows [n, V] of logits."""
    begin = len(request.prompt_logprobs) + 1
    token_ids = request.prompt_ids[begin : begin + len(rows)]
    logprobs, top = token_logprobs(rows, token_ids, request.params.top_logprobs)
    request.prompt_logprobs += logprobs
    request.prompt_top_logprobs += top


def token_logprobs(logits: Rows, token_ids: Sequence[int], num_top: int) -> tuple[list[float], list[dict[int, float]]]:
    """Log probabilities under the target's own logits: no bias, grammar, penalty, temperature or filter.

    Returns that of token r by row r of logits [R, V], R >= the number of tokens, and the `num_top` most likely tokens
    of each row, most likely first, the lower id first among equals.
    """
    logprobs = _C.token_logprobs(logits, list(token_ids))
    if num_top == 0:
        return logprobs, []
    top = []
    for row, token, logprob in zip(logits, token_ids, logprobs, strict=False):
        candidates = np.flatnonzero(row >= np.partition(row, -num_top)[-num_top])
        best = candidates[np.argsort(-row[candidates], kind="stable")][:num_top]
        values = logprob + (row[best].astype(np.float64) - float(row[token]))
        top.append(dict(zip(best.tolist(), values.tolist(), strict=True)))
    return logprobs, top


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
    assert len(greedy) == len(proposals) + 1, "a choice behind the anchor and behind each proposal"
    return next((i for i, (a, b) in enumerate(zip(proposals, greedy, strict=False)) if a != b), len(proposals))


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


def argmax(logits: Tensor) -> list[int]:
    """Argmax [n] of each row of logits [n, V]."""
    tokens: list[int] = (_numpy(logits) if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return tokens


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


def _ids(token_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(token_ids, dtype=np.int64)


ENOUGH = 32
"""Blocks of each way before one is believed to accept more."""


@dataclass(slots=True)
class _Way:
    blocks: int = 0
    accepted: int = 0

    @property
    def mean(self) -> float:
        """Accepted proposals of a block."""
        return self.accepted / max(1, self.blocks)


class ProposalChoice:
    """Greedy or drawn proposals, by what accepted more so far at about the same temperature; at first each in turn.

    Either keeps the target's distribution, as long as only what came before the block decided (docs/sampling.md). Which
    accepts more depends on the draft: drawn ones where its distribution is the target's.

    Later the other way is tried in block 64, 81, 100, ...: of n blocks, in the square root of n.
    """

    def __init__(self) -> None:
        self._ways: defaultdict[float, tuple[_Way, _Way]] = defaultdict(lambda: (_Way(), _Way()))
        """Greedy and drawn, by temperature."""

    def draw(self, request: Request) -> Draw | None:
        """Parameters to draw the request's next block with; None for greedy proposals."""
        draw = request.draw
        if draw is None:
            return None
        greedy, drawn = self._of(request)
        count = greedy.blocks + drawn.blocks
        if min(greedy.blocks, drawn.blocks) < ENOUGH:
            is_drawn = drawn.blocks < greedy.blocks
        else:
            is_drawn = (drawn.mean > greedy.mean) is not (math.isqrt(count) ** 2 == count)
        return draw if is_drawn else None

    def observe(self, request: Request, proposals: Proposals, num_accepted: int) -> None:
        """Counts a block that was verified."""
        if request.draw is not None and proposals.token_ids:
            way = self._of(request)[proposals.candidate_ids is not None]
            way.blocks += 1
            way.accepted += num_accepted

    def _of(self, request: Request) -> tuple[_Way, _Way]:
        return self._ways[round(request.params.temperature, 1)]
