# SPDX-License-Identifier: Apache-2.0
"""Policies of how many draft tokens a step verifies: the fastest, a number, or a schedule by batch size.

The drafter always fills its whole block; this decides how much of it the target verifies. Longer is not better: each
token costs, above all on mixture-of-experts targets at high batch. Output does not depend on it (docs/sampling.md).
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from statistics import median_low
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from dflash_trt.engine.proposals import Proposals
    from dflash_trt.runtime.accept import StepInput
    from dflash_trt.runtime.request import Request

MEMORY = 200  # verify passes that acceptance at a position is counted over; it changes with the text
REPLAN_STEPS = 16  # steps between two choices while the batch size stays in its bucket
WINDOW = 4  # measured steps whose median, the lower of two, is the cost of a step: what disturbs one makes it longer
COLD_STEPS = 6  # steps not measured behind those of a longer length, which leave caches cold; else it is one step
MAX_PROBE_STEPS = 32  # after so many steps a probe is given up: most of them read prompts
MAX_EXTRA = 0.125  # prompt tokens of a measured step over its blocks' tokens, and the share of requests that catch up
PROBE_SHARE = 0.015  # share of the steps that probes of one length may lose
SAMPLES = 5  # last probes of a length whose median counts
NOISE = 0.05  # standard deviation of one probe's ratio; single steps vary by 0.1 on a shared machine
UNMEASURED = 0.2  # how far below the line between its measured neighbours the logarithm of a cost may lie
MIN_GAIN = 0.02  # hysteresis: share of tokens/s that a switch must gain beyond a standard deviation


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of a step for the requests that decoded, [B] each; empty where it only read prompts."""

    proposed: Sequence[int]
    """Drafts that were verified."""
    accepted: Sequence[int]
    num_prompt_tokens: int
    """Prompt tokens that the same pass read."""
    num_caught_up: int
    """Requests for which the drafter also read the context of steps that did not draft."""

    @classmethod
    def of(cls, parts: Sequence[StepInput], accepted: Sequence[Sequence[int]]) -> StepRecord:
        """Record of a step before its tokens are emitted; `accepted` are the tokens of each part."""
        blocks = [(part, tokens) for part, tokens in zip(parts, accepted, strict=True) if part.request.is_prefilled]
        return cls(
            proposed=[len(part.proposals) for part, _ in blocks],
            accepted=[max(0, len(tokens) - 1) for _, tokens in blocks],
            num_prompt_tokens=sum(len(part.token_ids) for part in parts if not part.request.is_prefilled),
            num_caught_up=sum(bool(part.proposals) and not part.request.has_drafted for part, _ in blocks),
        )


class DraftLength:
    """Policy of how many of the K drafted tokens of each request a step verifies."""

    _explanation: str

    def limits(self, requests: Sequence[Request]) -> list[int]:
        """Drafts to verify for each request as a step begins, at most what its max_tokens leaves room for."""
        if not requests:
            return []
        chosen = self.choose(len(requests))
        return [
            min(self.of_request(request.params.draft_length, chosen), request.remaining - 1) for request in requests
        ]

    def choose(self, batch_size: int) -> int:
        """Draft length of the step, 0 (plain decoding) to K."""
        raise NotImplementedError

    def of_request(self, asked: int | None, chosen: int) -> int:
        """Draft length for a request that sets its own: min(asked, chosen), and `asked` itself under auto."""
        return chosen if asked is None else min(asked, chosen)

    def cut(self, proposals: Proposals, asked: int | None) -> Proposals:
        """Leading proposals that are worth verifying; a request's own draft length is not cut."""
        if proposals.survival is None or asked is not None:
            return proposals
        return proposals.first(self.cut_length(proposals.survival))

    def cut_length(self, survival: Sequence[float]) -> int:
        """Number of leading drafts to verify, of drafts that survive with these probabilities."""
        return len(survival)  # whether a draft is among them depends on no token but those before it

    def explain(self) -> str:
        """Current choice, and the reason for it."""
        return self._explanation

    def observe(self, step: StepRecord) -> None:
        """Learns from a step when it ends."""


class LengthByBatch(DraftLength):
    """Draft length of the largest scheduled batch size, 1 among them, that the step reaches."""

    def __init__(self, schedule: Mapping[int, int]) -> None:
        self._schedule = dict(sorted(schedule.items(), reverse=True))
        self._explanation = ", ".join(f"{length} from batch size {begin}" for begin, length in sorted(schedule.items()))

    def choose(self, batch_size: int) -> int:
        return next(length for begin, length in self._schedule.items() if batch_size >= begin)


class FixedLength(LengthByBatch):
    """One draft length for all steps."""

    def __init__(self, length: int) -> None:
        super().__init__({1: length})
        self.length, self._explanation = length, f"{length}: fixed"


class _Acceptance:
    """Counts by position: passes that judged its draft, having accepted all before it, and those that accepted it."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._judged, self._accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
        self.new_passes = Counter[tuple[int, int]]()  # by (proposed, accepted); the next call adds them to the others

    def expected_tokens(self) -> list[float]:
        """Expected tokens of a pass that verifies k = 0 .. K drafts: 1 + P(1) + .. + P(k)."""
        for (proposed, accepted), passes in self.new_passes.items():
            for i in range(min(proposed, accepted + 1)):
                self._judged[i] += passes
                self._accepted[i] += passes * (i < accepted)
        self.new_passes.clear()
        tokens, reached, share = [1.0], 1.0, 0.5
        for i, judged in enumerate(self._judged):
            share = (self._accepted[i] + 2 * share) / (judged + 2)  # where few judged it, as at the position before
            reached *= share
            tokens.append(tokens[-1] + reached)
            if judged > MEMORY:
                self._judged[i], self._accepted[i] = MEMORY, self._accepted[i] * MEMORY / judged
        return tokens


class _CostTable:
    """Costs of steps of length 0 .. K at the batch sizes of one bucket, and the best length."""

    def __init__(self, num_draft_tokens: int, best: int) -> None:
        self.best = best
        self.next_probe = [0.0] * (num_draft_tokens + 1)  # by length, the first step at which it may be probed again
        self._log_costs = {best: deque([0.0])}  # by length, of its last probes, in a unit of this table's own

    def add(self, length: int, ratio_to_best: float) -> None:
        logs = self._log_costs.setdefault(length, deque(maxlen=SAMPLES))
        logs.append(median_low(self._log_costs[self.best]) + math.log(ratio_to_best))

    def log_costs(self) -> tuple[list[float], list[float]]:
        """Log costs by length, interpolated where not measured, and their standard deviations."""
        measured = {length: median_low(logs) for length, logs in sorted(self._log_costs.items())}
        lengths = range(len(self.next_probe))
        logs = self._log_costs
        deviations = [NOISE / math.sqrt(len(logs[length])) if length in logs else math.inf for length in lengths]
        deviations[self.best] = 0.0
        return np.interp(lengths, list(measured), list(measured.values())).tolist(), deviations


class AutoLength(DraftLength):
    """Length k with the most expected tokens / cost(batch size, k), by measured acceptance and costs.

    Costs are ratios of neighbouring steps, as a machine's pace changes, in one table for each power of two of batch
    sizes. Steps run the table's best length but for probes: of no drafts and whole blocks again and again, of others
    while they may be better.
    """

    def __init__(self, num_draft_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._num_draft_tokens, self._clock = num_draft_tokens, clock
        self._acceptance = _Acceptance(num_draft_tokens)
        self._bucket, self._tables = -1, dict[int, _CostTable]()
        self._probed: int | None = None  # the length of a probe; then seconds of a step before and in it, and in all
        self._before = self._during = self._lost = 0.0  # those beyond what the best length takes for as many tokens
        self._length = num_draft_tokens  # of the present step
        self._window: deque[float] = deque(maxlen=WINDOW)  # seconds of the last steps of this length
        self._num_cold, self._step, self._next_replan = 1, 0, 0  # `_num_cold`: steps until they are measured
        self._began = self._seconds_per_token = 0.0
        self._explanation = f"{num_draft_tokens} of {num_draft_tokens}: not measured yet"
        self._cut = SurvivalCut()

    def choose(self, batch_size: int) -> int:
        """Best length of this batch size, or one that is probed."""
        if (bucket := round(math.log2(batch_size))) != self._bucket:
            self._enter(bucket)
        table, seconds = self._tables[bucket], median_low(self._window) if len(self._window) == WINDOW else 0.0
        if self._probed is not None and seconds and not self._during:
            self._during = seconds
            self._run(table.best)
        elif self._probed is not None and (seconds or self._step >= self._next_replan):
            self._end_probe(self._probed, seconds)
        if self._probed is None and seconds and self._step >= self._next_replan:
            self._replan(table, batch_size, seconds)
        if self._cut.begin_step(may_cut=self._probed is None and self._next_replan - self._step > WINDOW + 1):
            self._window.clear()
            self._num_cold = 1
        self._step, self._began = self._step + 1, self._clock()
        return self._length

    def of_request(self, asked: int | None, chosen: int) -> int:
        return chosen if asked is None else asked

    def cut_length(self, survival: Sequence[float]) -> int:
        """Number of drafts before the first one that costs more than it brings, in steps that are not measured."""
        return self._cut.length(survival)

    def observe(self, step: StepRecord) -> None:
        """Counts what was accepted, and measures the step if it did little but draft and verify as chosen."""
        if not step.proposed:
            return
        seconds, batch_size = self._clock() - self._began, len(step.proposed)
        if self._cut.is_cutting:
            return
        self._acceptance.new_passes.update(zip(step.proposed, step.accepted, strict=True))
        if self._probed is not None:
            self._lost += seconds - (batch_size + sum(step.accepted)) * self._seconds_per_token
        if round((num_proposed := sum(step.proposed)) / batch_size) == self._length:
            extra = max(step.num_prompt_tokens / (batch_size + num_proposed), step.num_caught_up / batch_size)
            if self._num_cold == 0 and extra <= MAX_EXTRA:
                self._window.append(seconds)
            self._num_cold = max(0, self._num_cold - 1)

    def _enter(self, bucket: int) -> None:
        """Runs the best length of another bucket; a new one begins with that of the nearest."""
        if self._probed is not None:
            self._end_probe(self._probed, 0.0)
        nearest = min(self._tables, key=lambda other: abs(other - bucket), default=bucket)
        best = self._tables[nearest].best if self._tables else self._num_draft_tokens
        self._tables.setdefault(bucket, _CostTable(self._num_draft_tokens, best))
        self._bucket, self._next_replan = bucket, self._step + REPLAN_STEPS
        self._cut.plan(())
        self._window.clear()
        self._run(self._tables[bucket].best)

    def _run(self, length: int) -> None:
        if length != self._length:
            self._num_cold, self._length = COLD_STEPS if length < self._length else 1, length
            self._window.clear()

    def _end_probe(self, length: int, after: float) -> None:
        """Records a probe; `after` is the time of a step of the best length after it, 0 if the probe was cut short."""
        table = self._tables[self._bucket]
        if after:
            table.add(length, self._during / math.sqrt(self._before * after))
        table.next_probe[length] = self._step + max(self._lost / self._before, 1) / PROBE_SHARE
        self._probed, self._next_replan = None, self._step
        self._run(table.best)

    def _replan(self, table: _CostTable, batch_size: int, seconds: float) -> None:
        """Switches to the length that is best by its measured cost and a standard deviation, or probes another."""
        tokens, (costs, deviations) = self._acceptance.expected_tokens(), table.log_costs()
        lengths = range(len(costs))
        gains = [math.log(tokens[k] / tokens[table.best]) - costs[k] + costs[table.best] for k in lengths]
        speeds = [batch_size * tokens[table.best] / seconds * math.exp(gain) for gain in gains]
        best = max(lengths, key=lambda k: gains[k] - deviations[k])
        if has_switched := gains[best] - deviations[best] > MIN_GAIN:
            table.best = best
            self._run(best)
        self._seconds_per_token = 1 / speeds[table.best]
        self._cut.plan([tokens[table.best] * math.exp(cost - costs[table.best]) for cost in costs])
        self._explanation = (
            f"{table.best} of {lengths[-1]}: {speeds[table.best]:.0f} tokens/s at {batch_size}"
            f" request{'s' * (batch_size > 1)}, {speeds[0]:.0f} without drafts, {speeds[-1]:.0f} with the whole block"
        )
        highest = [gains[k] + min(2 * deviations[k], UNMEASURED) for k in lengths]
        highest[0] = highest[-1] = math.inf
        due = [k for k in lengths if k != table.best and highest[k] > MIN_GAIN and self._step >= table.next_probe[k]]
        self._next_replan = self._step + (MAX_PROBE_STEPS if due and not has_switched else REPLAN_STEPS)
        if due and not has_switched:
            self._probed, self._before, self._during, self._lost = max(due, key=highest.__getitem__), seconds, 0.0, 0.0
            self._run(self._probed)


def parse_draft_length(given: int | str, num_draft_tokens: int) -> DraftLength:
    """Policy for auto, 7, or 1:7,8:3,32:0 (from batch size 1, 8, 32 on); RequestError for anything else."""
    text = str(given)
    with suppress(ValueError):
        if text == "auto":
            return AutoLength(num_draft_tokens)
        pairs = [tuple(map(int, part.split(":"))) for part in (text if ":" in text else f"1:{text}").split(",")]
        schedule = {begin: length for begin, length in pairs if 0 <= length <= num_draft_tokens}
        if len(schedule) == len(pairs) and min(schedule) == 1:
            return LengthByBatch(schedule) if ":" in text else FixedLength(schedule[1])
    raise RequestError(
        f"draft length: expected 0 to {num_draft_tokens}, a schedule by batch size that begins at 1 (1:7,8:3) or auto,"
        f" found {given!r}"
    )


class SurvivalCut:
    """Ends a block before the first draft that costs more than it brings, by the confidence head of a DSpark draft.

    Steps are cut only between measurements, which are of whole lengths.
    """

    def __init__(self) -> None:
        self.is_cutting = False
        """Whether the present step is cut: then it shows neither the cost of a length nor plain acceptance."""
        self._has_survival = False
        self._least_survival: list[float] = []  # by position, of a draft that is worth its cost; none before a plan

    def plan(self, tokens_per_cost: Sequence[float]) -> None:
        """Sets the tokens that each length 0 .. K must bring for its cost; () cuts nothing until the next plan."""
        self._least_survival = [after - before for before, after in pairwise(tokens_per_cost)]
        self._least_survival[:1] = self._least_survival[1:2]  # the first length's cost has the drafter's, spent by then

    def begin_step(self, *, may_cut: bool) -> bool:
        """Decides whether to cut a step; returns whether it is the first measured one after cut steps."""
        was_cutting = self.is_cutting
        self.is_cutting = may_cut and self._has_survival and bool(self._least_survival)
        return was_cutting and not may_cut

    def length(self, survival: Sequence[float]) -> int:
        """Drafts to verify of a request whose drafts survive with these probabilities."""
        self._has_survival = True
        if not self.is_cutting:
            return len(survival)
        return sum(1 for _ in takewhile(bool, map(operator.ge, survival, self._least_survival)))
