# SPDX-License-Identifier: Apache-2.0
"""Runs all probes in order and draws the conclusions: one document, the baseline of later ones."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError, EndpointError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.diagnosis import probes
from dflash_trt.observe.diagnosis.checks import Check, EndpointFinding
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.prober import Prober, chats
from dflash_trt.observe.diagnosis.probes import Probed
from dflash_trt.observe.diagnosis.speed import NO_LOAD, Speed, draft_lengths, speeds_missing
from dflash_trt.observe.diagnosis.speed import speeds as measure_speeds
from dflash_trt.observe.diagnosis.verdict import judged
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.counter_growth import (
    EngineAcceptance,
    counters_page,
    engine_acceptances,
    prefix_hits_between,
)
from dflash_trt.observe.endpoints.identify import ServerKind, identify

SECONDS = 110.0
SCHEMA = "dflash-trt/doctor-endpoint/3"
HINT = "dflash-trt doctor URL --json > healthy.json, while the server is well"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Probes and findings. A healthy diagnosis is the baseline of later ones."""

    schema: str = SCHEMA
    url: str
    runtime: ServerKind
    version: str | None
    model: str
    is_chat: bool
    acceptance: str
    """The server's figures that it was read from."""
    foreign_tokens: int = 0
    """Output tokens of other clients, whose acceptance is then in these figures."""
    seconds: float
    groups: list[ProbeGroup]
    engines: list[EngineAcceptance] = []
    """Empty for a server that does not tell its engines apart; includes other clients' requests."""
    speeds: list[Speed]
    findings: list[EndpointFinding]
    """Faults."""
    unmeasured: list[EndpointFinding]
    """Checks that could not be measured or judged, but can be after a change."""
    checks: list[Check]
    """Every check, and its result."""
    notes: list[EndpointFinding]
    """Notes."""


def diagnose(
    client: Client, *, model: str | None = None, baseline: Diagnosis | None = None, expected_tau: float | None = None,
    long_tokens: int | None = None, has_load: bool = True, seconds: float = SECONDS,
) -> Diagnosis:  # fmt: skip
    """Diagnoses within `seconds` seconds; raises EndpointError if nothing answers or `baseline` used another API."""
    began = time.monotonic()
    runtime = identify(client, model=model)
    is_chat = chats(client, runtime)
    if baseline is not None and baseline.is_chat != is_chat:
        api = {True: "chats", False: "completions"}
        raise EndpointError(f"baseline: expected one of {api[is_chat]}, found {api[baseline.is_chat]}")
    prober = Prober(client, runtime, is_chat=is_chat, seconds=seconds - (time.monotonic() - began))
    probed, hits = _probed(client, prober, long_tokens, has_load=has_load)
    healthy = {} if baseline is None else {group.name: group for group in baseline.groups if group.samples}
    verdict = judged(runtime, probed, healthy, expected_tau, hits)
    return Diagnosis(
        url=client.url, runtime=runtime.kind, version=runtime.version, model=runtime.model, is_chat=is_chat,
        acceptance=prober.how, foreign_tokens=prober.foreign_tokens, seconds=time.monotonic() - began,
        groups=probed.groups, engines=probed.engines, speeds=probed.speeds, **msgspec.structs.asdict(verdict),
    )  # fmt: skip


def _probed(client: Client, prober: Prober, long_tokens: int | None, *, has_load: bool) -> tuple[Probed, int | None]:
    """Runs all probes; also returns the tokens that the prefix cache served."""
    began = counters_page(client)
    short = probes.short(prober)
    served = probes.served(prober)
    seeds = probes.sampled(prober)
    before = counters_page(client)
    prefixes = probes.prefixes(prober, short)
    hits = prefix_hits_between(before, counters_page(client))
    long = probes.long(prober, short, long_tokens)
    plain, foreign, thinking = probes.plain(prober), probes.foreign(prober), probes.thinking(prober)
    lengths = draft_lengths(prober, len(short.shares_by_position))
    speeds, why_not = measure_speeds(prober, lengths) if has_load else ([], NO_LOAD)
    return Probed(
        short=short, served=served, seeds=seeds, prefixes=prefixes, long=long, plain=plain, foreign=foreign,
        thinking=thinking, speeds=speeds, speeds_missing=speeds_missing(speeds, lengths, why_not),
        unreadable=prober.unreadable, how=prober.how, engines=list(engine_acceptances(began, counters_page(client))),
    ), hits  # fmt: skip


def read_baseline(file: Path) -> Diagnosis:
    """Reads a healthy diagnosis; raises ConfigError for any other file."""
    baseline = read_json(file, Diagnosis, ConfigError, what="a diagnosis", hint=HINT)
    if baseline.schema != SCHEMA:
        raise ConfigError(f"{file}: expected {SCHEMA}, found {baseline.schema}", hint=HINT)
    if baseline.findings:
        raise ConfigError(
            f"{file}: expected the diagnosis of a healthy server, found: {baseline.findings[0].name}", hint=HINT
        )
    if not any(group.tau_of_drafting_passes for group in baseline.groups[:1]):
        raise ConfigError(f"{file}: expected a diagnosis with acceptance, found one without", hint=HINT)
    return baseline
