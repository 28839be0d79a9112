# SPDX-License-Identifier: Apache-2.0
"""The draft length that gives the most tokens a second, by measured acceptance and costs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median_low

from dflash_trt.runtime.policy.draft_length import DraftLength
from dflash_trt.runtime.policy.speed_model import CostTable, PositionAcceptance, SurvivalCut
from dflash_trt.runtime.policy.step_record import StepRecord

REPLAN_STEPS = 16
"""Steps between two choices while the batch size stays in its bucket."""
WINDOW = 4
"""Measured steps whose median, the lower of two, is the cost of a step: disturbances only make steps longer."""
COLD_STEPS = 6
"""Steps not measured after a switch to a shorter length, because longer steps leave caches cold; else it is one."""
MAX_PROBE_STEPS = 32
"""Steps after which a probe is given up: most of them read prompts."""
MAX_EXTRA = 0.125
"""Most prompt tokens that a measured step may read, as a share of its blocks' tokens."""
PROBE_SHARE = 0.015
"""Share of the steps that probes of one length may lose."""
UNMEASURED = 0.2
"""How far below the line between its measured neighbours the logarithm of a cost may lie."""
MIN_GAIN = 0.02
"""Hysteresis: share of tokens/s that a switch must gain beyond a standard deviation."""


class AutoLength(DraftLength):
    """Length k with the most expected tokens / cost(batch size, k), by measured acceptance and costs.

    Costs are ratios of neighbouring steps, as a machine's pace changes, in one table for each power of two of batch
    sizes. Steps run the table's best length but for probes: of no drafts and whole blocks again and again, of others
    while they may be better.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._acceptance = PositionAcceptance(num_draft_tokens)
        self._bucket, self._tables = -1, dict[int, CostTable]()
        self._probed: int | None = None  # the length of a probe; then seconds of a step before and in it, and in all
        self._before = self._during = self._lost = 0.0  # seconds in excess of the best length's for the same tokens
        self._length = num_draft_tokens  # length of the present step
        self._window: deque[float] = deque(maxlen=WINDOW)  # seconds of the last steps of this length
        self._num_cold, self._step, self._next_replan = 1, 0, 0  # `_num_cold`: steps until they are measured
        self._seconds_per_token = 0.0
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
        self._step += 1
        return self._length

    def of_request(self, asked: int, chosen: int) -> int:
        return asked

    def cut_length(self, survival: Sequence[float]) -> int:
        """Number of drafts before the first one that costs more than it brings, in steps that are not measured."""
        return self._cut.length(survival)

    def observe(self, step: StepRecord) -> None:
        """Counts what was accepted, and measures the step if it did little but draft and verify as chosen."""
        if not step.proposed or self._cut.is_cutting:
            return
        batch_size, num_proposed = len(step.proposed), sum(step.proposed)
        self._acceptance.add(zip(step.proposed, step.accepted, strict=True))
        if self._probed is not None:
            num_tokens = batch_size + sum(step.accepted)
            self._lost += step.seconds - num_tokens * self._seconds_per_token
        if round(num_proposed / batch_size) == self._length:
            if self._num_cold == 0 and step.num_prompt_tokens / (batch_size + num_proposed) <= MAX_EXTRA:
                self._window.append(step.seconds)
            self._num_cold = max(0, self._num_cold - 1)

    def _enter(self, bucket: int) -> None:
        """Runs the best length of another bucket; a new one begins with that of the nearest."""
        if self._probed is not None:
            self._end_probe(self._probed, 0.0)
        nearest = min(self._tables, key=lambda other: abs(other - bucket), default=bucket)
        best = self._tables[nearest].best if self._tables else self._num_draft_tokens
        self._tables.setdefault(bucket, CostTable(self._num_draft_tokens, best))
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

    def _replan(self, table: CostTable, batch_size: int, seconds: float) -> None:
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
