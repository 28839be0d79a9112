# SPDX-License-Identifier: Apache-2.0
"""A loaded server, step by step: continuous batching, chunked prefill, speculation, one clock.

Every step is priced by the cost model; requests are admitted first come, first served, while slots are free; prompts
join the steps in chunks; each request accepts by its own probabilities. Before the decoder stands a front end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile
from dflash_trt.observe.estimate.arrivals import Arrival
from dflash_trt.observe.estimate.shapes import Method
from dflash_trt.observe.estimate.step import StepLoad, StepModel

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
GRID_BITS = 5  # contexts and chunks are rounded to so many leading bits, by 3 % at most, and priced once
SPREAD = 0.3
"""Standard deviation of the logarithm of the exponent by which a request's acceptance differs from the mean's."""
MAX_STEPS = 20_000_000  # a guard: a simulation that does not end is our bug


class Percentiles(msgspec.Struct, frozen=True):
    """Of a duration in seconds."""

    p50: float
    p90: float
    p99: float


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What the users of a loaded server saw."""

    method: Method
    num_requests: int
    seconds: float
    """Until the last request ended."""
    ttft: Percentiles
    """From arrival to the first token."""
    token_interval: Percentiles
    """A request's time after its first token, over its tokens after the first."""
    chunk_interval: Percentiles
    """Between two deliveries to a user; a delivery holds what a step accepted."""
    output_rate: float
    """Output tokens a second, all GPUs."""
    goodput: float
    """Requests a second whose user got the speed asked for; all of them where none was."""
    mean_batch: float
    mean_waiting: float
    max_waiting: int
    tau: float
    num_steps: int
    is_saturated: bool
    """Whether requests came faster than they were served: the queue was longest near the end of the arrivals."""


class SimulatedServer:
    """One deployment under load."""

    def __init__(
        self,
        model: StepModel,
        method: Method,
        acceptance: AcceptanceProfile,
        choose_length: Callable[[int], int],
        max_batch: int,
        seed: int = 0,
        *,
        prefill_chunk: int | None = None,
    ) -> None:
        """`choose_length` gives the drafts of a step by the requests in it; `max_batch` slots are there.

        Prompt tokens of a step are at most what max_num_tokens leaves, and `prefill_chunk`, where it is given.
        """
        self._model, self._method, self._choose = model, method, choose_length
        self._prefill_chunk = model.system.max_num_tokens if prefill_chunk is None else prefill_chunk
        self._random = np.random.default_rng(seed)
        longest = max(1, *(choose_length(batch) for batch in range(1, max_batch + 1)))
        shares = np.array(acceptance.shares)
        self._shares = shares[np.minimum(np.arange(longest), len(shares) - 1)]
        self._max_batch = max_batch
        self._prices: dict[tuple[int, int, int, int, int], float] = {}

    def run(self, arrivals: Sequence[Arrival], slo: float | None = None) -> Simulation:
        """Serves all `arrivals`, in order of time, to their end; goodput counts users with `slo` tokens/s."""
        log = _Log(len(arrivals))
        batch = _Batch(self._shares, self._random)
        waiting: deque[int] = deque()
        filling: deque[list[int]] = deque()  # request and what is left of its prompt
        front = _FrontEnd(self._model, arrivals)
        came = front.admitted
        clock, upcoming = 0.0, 0
        while upcoming < len(arrivals) or waiting or filling or batch.size:
            if not (waiting or filling or batch.size):
                clock = max(clock, came[upcoming])
            while upcoming < len(arrivals) and came[upcoming] <= clock:
                waiting.append(upcoming)
                upcoming += 1
            while waiting and len(filling) + batch.size < self._max_batch:
                index = waiting.popleft()
                filling.append([index, arrivals[index].prompt_tokens])
            length = self._choose(batch.size) if batch.size else 0
            prefilled, chunk = self._chunk(filling, batch.size * (length + 1))
            seconds = self._price(batch.size, length, batch.mean_context, chunk, len(prefilled))
            seconds += front.delay(clock, seconds, batch.size + len(prefilled))
            clock += seconds
            log.step(clock, seconds, batch.size, len(waiting))
            seen = front.deliver(clock, batch.size + len(prefilled))
            log.end(batch.step(length), seen)
            log.begin(prefilled, seen)
            batch.add([(i, arrivals[i]) for i in prefilled if arrivals[i].output_tokens > 1])
        return log.summary(self._method, arrivals, clock, slo, self._max_batch)

    def _chunk(self, filling: deque[list[int]], used: int) -> tuple[list[int], int]:
        """Prompt tokens that join the step, oldest request first, and the requests whose prompts end with them."""
        room = min(max(self._model.system.max_num_tokens - used, 0), self._prefill_chunk)
        prefilled, chunk = [], 0
        while filling and room:
            taken = min(room, filling[0][1])
            filling[0][1] -= taken
            room -= taken
            chunk += taken
            if not filling[0][1]:
                prefilled.append(filling.popleft()[0])
        return prefilled, chunk

    def _price(self, batch: int, length: int, context: float, chunk: int, prompts: int) -> float:
        key = (batch, length, _rounded(context), _rounded(chunk), prompts)
        if key not in self._prices:
            load = StepLoad(batch=batch, draft_tokens=length, context=key[2], prompt_tokens=key[3], prompts=prompts)
            self._prices[key] = self._model.price(self._method, load).seconds
        return self._prices[key]


def _rounded(count: float) -> int:
    """To GRID_BITS leading bits."""
    step: int = 1 << max(0, int(count).bit_length() - GRID_BITS)
    return round(count / step) * step


class _FrontEnd:
    """HTTP and tokenizer before the decoder, streams behind it: each does one thing after the other.

    Of the embedded runtime it is a thread that shares an interpreter with the decoder: then what it does delays steps.
    """

    def __init__(self, model: StepModel, arrivals: Sequence[Arrival]) -> None:
        self._request_seconds = model.rates.frontend_request_seconds
        self._chunk_seconds = model.rates.frontend_chunk_seconds
        self._is_shared = model.system.runtime == "embedded"
        self._arrivals = [arrival.seconds for arrival in arrivals]
        self._free = 0.0
        self.admitted: list[float] = []
        """When the decoder has each request."""
        for at in self._arrivals:
            self.admitted.append(max(self.admitted[-1] if self.admitted else 0.0, at) + self._request_seconds)

    def delay(self, begin: float, seconds: float, chunks: int) -> float:
        """Of a step from `begin` that would take `seconds`, by the requests that come meanwhile and its chunks."""
        if not self._is_shared:
            return 0.0
        requests = bisect_right(self._arrivals, begin + seconds) - bisect_right(self._arrivals, begin)
        return requests * self._request_seconds + chunks * self._chunk_seconds

    def deliver(self, clock: float, chunks: int) -> float:
        """When the users have what the step that ended at `clock` gave them."""
        if self._is_shared:
            return clock
        self._free = max(self._free, clock) + chunks * self._chunk_seconds
        return self._free


class _Batch:
    """The requests that decode."""

    def __init__(self, shares: Floats, random: np.random.Generator) -> None:
        self._shares, self._random = shares, random
        self._index = np.zeros(0, dtype=np.int64)
        self._left = np.zeros(0, dtype=np.int64)  # output tokens to come
        self._context = np.zeros(0, dtype=np.int64)
        self._reach = np.zeros((0, len(shares)))  # probability that a position and all before it hold
        self._total_context = 0
        self._until_end = 0  # output tokens of the request that is nearest its end
        self.size = 0

    @property
    def mean_context(self) -> float:
        """Tokens in a request's cache."""
        return self._total_context / self.size if self.size else 0.0

    def add(self, requests: list[tuple[int, Arrival]]) -> None:
        """Requests whose prompts are through, their first token with it."""
        if not requests:
            return
        exponents = np.exp(SPREAD * self._random.standard_normal((len(requests), 1)))
        self._reach = np.concatenate([self._reach, np.cumprod(self._shares**exponents, axis=1)])
        self._index = np.concatenate([self._index, [index for index, _ in requests]])
        self._left = np.concatenate([self._left, [arrival.output_tokens - 1 for _, arrival in requests]])
        self._context = np.concatenate([self._context, [arrival.prompt_tokens + 1 for _, arrival in requests]])
        self._count()

    def step(self, length: int) -> Integers:
        """One pass with `length` drafts; gives the requests that it ended."""
        if not self.size:
            return self._index
        if length:
            draws = self._random.random((self.size, 1))
            emitted = 1 + np.count_nonzero(self._reach[:, :length] > draws, axis=1)
        else:
            emitted = np.ones(self.size, dtype=np.int64)
        self._left -= emitted
        self._context += emitted
        self._total_context += int(emitted.sum())
        self._until_end -= length + 1
        if self._until_end > 0:  # none can have ended
            return self._index[:0]
        kept = self._left > 0
        ended = self._index[~kept]
        if ended.size:
            self._index, self._left, self._context = self._index[kept], self._left[kept], self._context[kept]
            self._reach = self._reach[kept]
        self._count()
        return ended

    def _count(self) -> None:
        self.size = len(self._index)
        self._total_context = int(self._context.sum())
        self._until_end = int(self._left.min()) if self.size else 0


class _Log:
    """What is written down while the server runs."""

    def __init__(self, count: int) -> None:
        self._first, self._last = np.zeros(count), np.zeros(count)
        self._steps: list[tuple[float, float, int, int]] = []  # clock, seconds, batch, waiting

    def step(self, clock: float, seconds: float, batch: int, waiting: int) -> None:
        """One step, at its end."""
        assert len(self._steps) < MAX_STEPS
        self._steps.append((clock, seconds, batch, waiting))

    def begin(self, requests: list[int], clock: float) -> None:
        """First tokens."""
        for index in requests:
            self._first[index] = self._last[index] = clock

    def end(self, requests: Integers, clock: float) -> None:
        """Last tokens."""
        if requests.size:
            self._last[requests] = clock

    def summary(
        self, method: Method, arrivals: Sequence[Arrival], clock: float, slo: float | None, max_batch: int
    ) -> Simulation:
        """Percentiles and means."""
        came = np.array([arrival.seconds for arrival in arrivals])
        tokens = np.array([arrival.output_tokens for arrival in arrivals])
        clocks, seconds, batches, waiting = (np.array(column) for column in zip(*self._steps, strict=True))
        decoding = batches > 0
        intervals = (self._last - self._first) / np.maximum(tokens - 1, 1)
        passes = int(batches.sum())
        is_good = intervals <= (1 / slo if slo else np.inf)
        return Simulation(
            method=method,
            num_requests=len(arrivals),
            seconds=clock,
            ttft=_percentiles(self._first - came),
            token_interval=_percentiles(intervals[tokens > 1]),
            chunk_interval=_percentiles(np.repeat(seconds[decoding], batches[decoding])),
            output_rate=int(tokens.sum()) / clock,
            goodput=float(is_good.sum()) / clock,
            mean_batch=float((batches * seconds).sum()) / clock,
            mean_waiting=float((waiting * seconds).sum()) / clock,
            max_waiting=int(waiting.max()),
            tau=int((tokens - 1).sum()) / passes if passes else 1.0,
            num_steps=len(self._steps),
            is_saturated=_is_saturated(clocks, waiting, float(came[-1]), max_batch),
        )


def _percentiles(values: Floats) -> Percentiles:
    if not values.size:
        return Percentiles(0.0, 0.0, 0.0)
    return Percentiles(*(float(value) for value in np.percentile(values, (50, 90, 99))))


def _is_saturated(clocks: Floats, waiting: Integers, until: float, max_batch: int) -> bool:
    """Whether the queue at the end of the arrivals is longer than in their first half, and than half a batch."""
    half = waiting[clocks <= until / 2].max(initial=0)
    end = waiting[(clocks >= until * 0.9) & (clocks <= until)].max(initial=0)
    return bool(end > max(1.5 * half, max_batch / 2, 4))
