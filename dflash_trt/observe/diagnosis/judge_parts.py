# SPDX-License-Identifier: Apache-2.0
"""Finds a part that accepts nothing where the rest is healthy: an engine, a request, a draft position."""

from __future__ import annotations

from dflash_trt.api.acceptance import NEAR_ZERO_TAU, Acceptance
from dflash_trt.observe.diagnosis.checks import EndpointFinding, finding
from dflash_trt.observe.diagnosis.noise import tau_text
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.endpoints.counter_growth import EngineAcceptance
from dflash_trt.observe.endpoints.identify import ServerKind

MIN_PASSES = 20
"""Passes without an accepted draft after which a request or an engine is told from an unlucky one."""
MIN_TOKENS = 200
"""Output tokens of an engine without drafts after which it is told from one that has just begun."""
MIN_ACCEPTED = 20
USUAL, CLIFF = 0.3, 0.1
"""Share of the drafts accepted at one position that the next accepts, too: usually more than USUAL, at a cliff less
than CLIFF.
"""


def dead_engines(kind: ServerKind, engines: list[EngineAcceptance]) -> list[EndpointFinding]:
    """Engines that verify no draft or accept none, while another one does."""
    alive = [each for each in engines if each.drafting_passes and each.tau >= NEAR_ZERO_TAU]
    if not alive:
        return []
    rejecting = [each for each in engines if each.drafting_passes >= MIN_PASSES and each.tau < NEAR_ZERO_TAU]
    idle = [each for each in engines if not each.drafting_passes and each.output_tokens >= MIN_TOKENS]
    found = []
    if rejecting:
        figure = f"acceptance length {engines_text(rejecting)}, against {engines_text(alive)}"
        found.append(finding(kind, "an engine accepts no drafts", figure, "engine", "pair"))
    if idle:
        names = ", ".join(each.engine for each in idle)
        figure = f"engine {names} verified no draft; acceptance length {engines_text(alive)}"
        found.append(finding(kind, "an engine decodes without drafts", figure, "engine", "no drafter"))
    return found


def engines_text(engines: list[EngineAcceptance]) -> str:
    """'4.05 in engine 0, 1.00 in engine 1'."""
    return ", ".join(f"{each.tau:.2f} in engine {each.engine}" for each in engines)


def rejected_requests(kind: ServerKind, short: ProbeGroup) -> list[EndpointFinding]:
    """Requests of which no draft was accepted in MIN_PASSES passes or more, where others accept some."""
    counts = [sample.acceptance for sample in short.samples if sample.acceptance is not None]
    rejected = [count for count in counts if count.drafting_passes >= MIN_PASSES and not count.accepted]
    if not rejected or not any(count.accepted for count in counts):
        return []
    fewest = min(count.drafting_passes for count in rejected)
    figure = (
        f"{tau_text(short)} over all; {len(rejected)} of {len(counts)} requests accepted no draft in {fewest} or more"
        " passes each, while others did"
    )
    return [finding(kind, "requests without an accepted draft", figure, "engine", "prefix")]


def cliff(kind: ServerKind, counts: Acceptance) -> list[EndpointFinding]:
    """A position from which drafts are no longer accepted, though the one before accepts its usual share."""
    accepted = (counts.drafting_passes, *counts.accepted_by_position)[: int((counts.draft_length or 0) + 0.5) + 1]
    for position in range(2, len(accepted)):
        before, at, after = accepted[position - 2 : position + 1]
        if at >= max(MIN_ACCEPTED, USUAL * before) and after < CLIFF * at:
            figure = f"position {position - 1} accepts {at} drafts in {counts.drafting_passes} passes, the next {after}"
            return [finding(kind, "acceptance stops at a position", figure, "window", "block")]
    return []
