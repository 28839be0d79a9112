# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as tables and lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dflash_trt.errors import printable
from dflash_trt.observe.diagnosis.checks import NOT_MEASURED, Check, EndpointFinding
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.pages.page_templates import Table

SHOWN_POSITIONS = 16


def tables(diagnosis: Diagnosis) -> Iterator[Table]:
    """The result of each probe, and the speeds if measured."""
    version = f" {diagnosis.version}" if diagnosis.version else ""
    title = f"{diagnosis.model} at {diagnosis.url} ({diagnosis.runtime}{version}), {diagnosis.seconds:.0f} s"
    columns = ("probe", "requests", "prompt tokens", "tau of drafting passes", "accepted at position 1, 2, ... in %")
    yield Table(title=title, columns=columns, rows=tuple(map(_row, diagnosis.groups)))
    if diagnosis.speeds:
        rows = tuple(
            (
                str(speed.concurrency),
                "the server's choice" if speed.draft_length is None else str(speed.draft_length),
                ", ".join(f"{rate:.0f}" for rate in speed.tokens_per_second),
            )
            for speed in diagnosis.speeds
        )
        of_speeds = ("requests at a time", "drafts a step", "tokens/s of all")
        yield Table(title="speed, one figure a round", columns=of_speeds, rows=rows)


def checks_table(checks: list[Check]) -> Table:
    """The verdict: each check, and its result."""
    rows = tuple((check.name, check.verdict, printable(check.figure)) for check in checks)
    return Table(title="verdict", columns=("check", "verdict", "measured"), rows=rows)


def conclusion(checks: list[Check], findings: list[EndpointFinding]) -> str:
    """The last line: the problems found in the measured checks, if any."""
    missing = [check.name for check in checks if check.verdict == NOT_MEASURED]
    measured = len(checks) - len(missing)
    found = len(findings)
    wrong = f"{found} thing{'s' if found > 1 else ''} wrong" if found else "nothing wrong"
    return f"{wrong} in {measured} of {len(checks)} checks" + (
        f"; not measured: {', '.join(missing)}" if missing else ""
    )


def findings_lines(
    notes: Iterable[EndpointFinding], unmeasured: Iterable[EndpointFinding], findings: Iterable[EndpointFinding]
) -> Iterator[str]:
    """Each finding with its figure and its likely causes."""
    for word, listed in (("worth knowing", notes), ("NOT MEASURED", unmeasured), ("WRONG", findings)):
        for finding in listed:
            yield f"\n{word}: {finding.name}\n  {printable(finding.figure)}"
            if len(finding.causes) > 1:
                yield "  likely causes, in this order:"
            for number, cause in enumerate(finding.causes, 1):
                yield f"  {number}. {cause.what}\n     see     {cause.source}\n     change  {cause.setting}"


def _row(group: ProbeGroup) -> tuple[str, ...]:
    if not group.samples:
        return group.name, "0", "-", "-", f"not asked: {group.why_not}"
    lengths = [sample.input_tokens for sample in group.samples if sample.input_tokens is not None]
    shares = " ".join(f"{share * 100:.0f}" for share in group.shares_by_position[:SHOWN_POSITIONS])
    remark = f"{shares} ({group.why_not})" if group.why_not else shares
    return (
        group.name,
        str(len(group.samples)),
        f"{min(lengths)} to {max(lengths)}" if lengths else "-",
        "-" if group.tau_of_drafting_passes is None else f"{group.tau_of_drafting_passes:.2f}",
        remark,
    )
