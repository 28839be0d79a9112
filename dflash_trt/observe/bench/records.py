# SPDX-License-Identifier: Apache-2.0
"""What `bench run` writes and `bench report` reads: one run, and one point per method, category and concurrency.

Tau is tau of drafting passes throughout: servers count no other passes. What other tools count is converted to
`Acceptance` before it is written.
"""

from __future__ import annotations

from math import isclose
from typing import Annotated, Literal

import msgspec

from dflash_trt.api.acceptance import Acceptance, Count
from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.read import is_file_name

SCHEMA = "dflash-trt/bench/2"
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class BenchRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records; unknown fields in a file are errors."""


class LoadMachine(BenchRecord, frozen=True, kw_only=True):
    cpu: str
    cores: Positive
    memory_gib: Amount
    gpus: tuple[str, ...] = ()


class PromptSet(BenchRecord, frozen=True, kw_only=True):
    """Which prompts; `sha256` is of what was sent."""

    name: str
    source: str
    sha256: str
    num_prompts: Positive
    categories: tuple[str, ...] = ()


class RequestSettings(BenchRecord, frozen=True, kw_only=True):
    template: Literal["chat", "completions"]
    thinking: Literal["on", "off"] | None = None
    temperature: Amount
    max_tokens: Positive
    ignore_eos: bool = False
    extra: dict[str, str | int | float | bool] = {}
    """Further fields of each body: reasoning_effort, top_p."""


class Arrivals(BenchRecord, frozen=True, kw_only=True):
    """Open loop: requests begin at a rate, whatever the server answers, and a point's concurrency only bounds them."""

    request_rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Requests a second."""
    arrival_pattern: Literal["poisson", "constant"] = "poisson"


class BenchMethod(BenchRecord, frozen=True, kw_only=True):
    name: str
    url: str
    runtime: str
    runtime_version: str | None = None
    model: str
    overrides: dict[str, str | int | float | bool | None] = {}
    """Where its requests differ from the run's, by field of RequestSettings."""


class BenchRun(BenchRecord, frozen=True, kw_only=True):
    """run.json."""

    schema: str = SCHEMA
    created: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    seed: int
    versions: dict[str, str]
    client: LoadMachine
    server: str | None = None
    """The server's hardware, as the user stated it: '8x B300'."""
    num_gpus: Positive | None = None
    """GPUs of each server, as the user stated them; None: throughput is per server."""
    prompt_set: PromptSet
    request: RequestSettings
    concurrencies: tuple[Positive, ...]
    arrivals: Arrivals | None = None
    """None: closed loop, with as many requests at once as a point's concurrency says."""
    methods: tuple[BenchMethod, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_schema(self.schema)
        methods = tuple(method.name for method in self.methods)
        for kind, names in (("methods", methods), ("categories", self.prompt_set.categories)):
            for name in names:
                check_name(kind, name)
            if len(set(names)) != len(names):
                raise ConfigError(f"{kind}: expected each once, found {shown(list(names))}")
        if not methods or not self.concurrencies or len(set(self.concurrencies)) != len(self.concurrencies):
            raise ConfigError(f"expected methods, and concurrencies each once, found {shown(self.concurrencies)}")


class RequestCounts(BenchRecord, frozen=True, kw_only=True):
    """How the requests of a point ended."""

    sent: Count
    completed: Count
    failed: Count = 0
    timed_out: Count = 0
    cut: Count = 0
    """Completed requests that max_tokens ended."""
    errors: dict[str, Positive] = {}
    """What the failed and timed-out said, and how often."""

    def __post_init__(self) -> None:
        lost = self.failed + self.timed_out
        if self.sent != self.completed + lost or sum(self.errors.values()) != lost:
            raise ConfigError(
                "requests: expected sent = completed + failed + timed_out, and an error for each that was lost, found"
                f" {shown(msgspec.to_builtins(self))}"
            )


class Distribution(BenchRecord, frozen=True, kw_only=True):
    """Over the completed requests of a point."""

    mean: Amount
    p50: Amount
    p90: Amount
    p99: Amount


class RequestRow(BenchRecord, frozen=True, kw_only=True):
    input_tokens: Count
    output_tokens: Count
    ttft_seconds: Amount | None = None
    seconds: Amount
    """From sending it to its last token."""
    finish: str | None = None
    category: str | None = None
    acceptance: Acceptance | None = None
    """Acceptance of this request, if the server reports it with the answer."""


class RecordedAcceptance(BenchRecord, frozen=True, kw_only=True):
    """What the server published about a point."""

    source: Literal["counters", "gauges", "per request", "not published"]
    counts: Acceptance | None = None
    """Counts, if the server publishes them; passes without drafts are in none of them."""
    tau_of_drafting_passes: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None
    """Computed from the counts, or the published average; None without a drafting pass."""
    why: str | None = None
    """Where it is not published."""
    how: str | None = None
    """From which figures of the server, and how they were converted."""

    def __post_init__(self) -> None:
        counts, tau = self.counts, self.tau_of_drafting_passes
        if counts is not None:
            at_least = (counts.drafting_passes, *counts.accepted_by_position)
            is_whole = (
                counts.proposed is not None
                and counts.accepted <= counts.proposed
                and sorted(at_least, reverse=True) == list(at_least)
                and (len(at_least) == 1 or sum(at_least[1:]) == counts.accepted)
                and isclose(tau or 0, counts.tau_of_drafting_passes or 0, rel_tol=1e-6)
            )
        else:
            is_whole = (self.why is not None and tau is None) if self.source == "not published" else tau is not None
        if not is_whole:
            raise ConfigError(
                "acceptance: expected counts that add up to tau_of_drafting_passes, an average without counts, or why"
                f" neither is published, found {shown(msgspec.to_builtins(self))}"
            )


class BenchPoint(BenchRecord, frozen=True, kw_only=True):
    """One method at one concurrency, on one category or on all prompts."""

    schema: str = SCHEMA
    method: str
    category: str | None = None
    concurrency: Positive
    seed: int
    requests: RequestCounts
    seconds: Amount
    """The measured interval."""
    input_tokens: Count
    output_tokens: Count
    """Output tokens of the completed requests, by the server's own count."""
    output_tokens_per_second: Amount
    ttft_seconds: Distribution | None = None
    itl_seconds: Distribution | None = None
    """Between two tokens."""
    request_seconds: Distribution | None = None
    user_tokens_per_second: Distribution | None = None
    """(output tokens - 1) / (end - first token), per request; None where no request has two tokens."""
    rows: tuple[RequestRow, ...]
    acceptance: RecordedAcceptance

    @property
    def name(self) -> str:
        category = "" if self.category is None else f", {self.category}"
        return f"{self.method}{category}, concurrency {self.concurrency}"

    def __post_init__(self) -> None:
        check_schema(self.schema)
        check_name("method", self.method)
        if self.category is not None:
            check_name("category", self.category)
        rows = self.rows
        sums = (len(rows), sum(row.input_tokens for row in rows), sum(row.output_tokens for row in rows))
        if sums != (expected := (self.requests.completed, self.input_tokens, self.output_tokens)):
            raise ConfigError(
                f"rows: expected one per completed request that add up to its tokens, (requests, input, output) ="
                f" {expected}, found {sums}"
            )


def request_of(request: RequestSettings, method: BenchMethod) -> RequestSettings:
    """What one method's requests ask for."""
    return msgspec.convert({**msgspec.to_builtins(request), **method.overrides}, RequestSettings)


def check_schema(schema: str) -> None:
    """Raises ConfigError for a file of another kind or time."""
    if schema != SCHEMA:
        raise ConfigError(f"schema: expected {SCHEMA}, found {shown(schema)}")


def check_name(kind: str, name: str) -> None:
    """Raises ConfigError for a method or category that cannot be the name of its folder."""
    if not is_file_name(name) or name.startswith(".") or name.endswith(".json") or name == "aiperf":
        raise ConfigError(f"{kind}: expected a name that can be a folder's, found {shown(name)}")
