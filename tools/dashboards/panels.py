# SPDX-License-Identifier: Apache-2.0
"""The one list of panels, and the one list of alerts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.dashboards.runtimes import Runtime, quantile

Query = tuple[str, str]
"""Legend and expression; an empty expression is not published."""
ENGINE = "{{model_name}} {{instance}} {{engine}}"
DRIFT = 0.85
"""Share of the day before; tau below it is an alert. Smaller changes come with the mix of prompts."""


@dataclass(frozen=True)
class Panel:
    """One figure over time."""

    title: str
    unit: str
    """Grafana's id of the unit."""
    about: str
    queries: Callable[[Runtime], list[Query]]
    is_by_engine: bool = False
    """Whether each engine has lines of its own; else all of a model are summed."""
    threshold: float | None = None
    """A line: what is on the wrong side of it raises an alert."""


def _quantiles(*names: str) -> list[Query]:
    return [(f"p{share * 100:.0f}", quantile(share, *names)) for share in (0.5, 0.95)] if names else []


def before(expression: str, window: str, offset: str) -> str:
    """`expression` over `window`, ending `offset` ago."""
    return expression.replace("[WINDOW]", f"[{window}] offset {offset}")


ROWS: dict[str, list[Panel]] = {
    "Acceptance": [
        Panel(
            "Tau of drafting passes",
            "none",
            "Tokens that one verify pass brings: accepted drafts and the bonus token. 1 is no speculation.",
            lambda runtime: [(ENGINE, runtime.tau)],
            is_by_engine=True,
        ),
        Panel(
            "Acceptance by position",
            "percentunit",
            "Share of verify passes that accepted the draft at a position. A healthy drafter falls slowly and evenly; "
            "a step to zero after the fourth or fifth is a sliding window that runs as full attention.",
            lambda runtime: [(f"{ENGINE} {{{{{runtime.position_label}}}}}", runtime.positions)],
            is_by_engine=True,
        ),
        Panel(
            "Speed-up (estimate)",
            "none",
            "Time per output token without speculation, as typed above, over what it is now. Measure it with plain "
            "decoding at the same load, or take it from `dflash-trt estimate`. Empty until it is typed in.",
            lambda runtime: [("{{model_name}}", f"$plain_ms / 1000 / ({runtime.tpot})")],
            threshold=1,
        ),
        Panel(
            "Acceptance against the day before",
            "percentunit",
            "Tau of drafting passes over that of six hours a day ago. It drifts when prompts leave what the drafter "
            "was trained on, or when target, template or drafter changed.",
            lambda runtime: [("{{model_name}}", f"({runtime.tau}) / ({before(runtime.tau, '6h', '1d')})")],
            threshold=DRIFT,
        ),
    ],
    "Load": [
        Panel(
            "Requests",
            "none",
            "Running in the batch, and waiting for room in it.",
            lambda runtime: [("running", runtime.running), ("waiting", runtime.waiting)],
        ),
        Panel("Time in the queue", "s", "Before a request's prefill.", lambda runtime: _quantiles(runtime.queue)),
        Panel("Output tokens", "tokps", "All requests.", lambda runtime: [("{{model_name}}", runtime.output_tokens)]),
        Panel(
            "Finished requests",
            "reqps",
            "By reason. An abort is a client that went away.",
            lambda runtime: [("{{finished_reason}}", runtime.finished)],
        ),
    ],
    "Latency": [
        Panel("Time to first token", "s", "Queue and prefill.", lambda runtime: _quantiles(runtime.ttft)),
        Panel(
            "Inter-token latency",
            "s",
            "Between the steps of a request, each of which brings tau tokens; in SGLang between tokens.",
            lambda runtime: _quantiles(*runtime.itl),
        ),
        Panel(
            "Time per output token and per verify pass",
            "s",
            "Means. Their ratio is near tau.",
            lambda runtime: [("token", runtime.tpot), ("verify pass", runtime.step_seconds)],
        ),
    ],
    "Caches": [
        Panel("Caches", "percentunit", "As the runtime counts them.", lambda runtime: list(runtime.gauges.items())),
    ],
}


@dataclass(frozen=True)
class Alert:
    """A rule; `expression` is empty where a runtime does not publish what it needs."""

    name: str
    severity: str
    lasting: str
    expression: Callable[[Runtime], str]
    summary: str
    """Follows the name of the engine or model."""
    description: str
    is_by_engine: bool = True
    """Whether each engine has an alert of its own; else all of a model are summed."""


def _enough(runtime: Runtime) -> str:
    """Half a hour with at least 1000 verify passes: tau's standard error is then near 2 %."""
    return f"({runtime.drafts}) * 1800 > 1000"


def _collapsed(runtime: Runtime) -> str:
    """Drafts have to be six tokens long: a shorter one accepts no sixth."""
    if not runtime.positions:
        return ""
    label = runtime.position_label
    first = runtime.positions.replace("SELECTOR", f'SELECTOR,{label}="0"', 1)
    sixth = runtime.positions.replace("SELECTOR", f'SELECTOR,{label}="5"', 1)
    is_long = f" and on (LABELS) ({runtime.proposed}) / ({runtime.drafts}) >= 6" if runtime.proposed else ""
    return f"({sixth}) < 0.01 and on (LABELS) ({first}) > 0.5 and on (LABELS) ({_enough(runtime)}){is_long}"


ALERTS = [
    Alert(
        "AcceptanceNearZero",
        "critical",
        "15m",
        lambda runtime: f"({runtime.tau}) < 1.2 and ({_enough(runtime)})",
        'acceptance length {{ $value | printf "%.2f" }}: drafts bring nothing',
        "Answers are right and slower than plain decoding. Likely a draft of another target, wrong taps, lost scales "
        "or a lost head. `dflash-trt doctor URL` looks for the cause.",
    ),
    Alert(
        "AcceptanceDrift",
        "warning",
        "30m",
        lambda runtime: f"({runtime.tau}) / ({before(runtime.tau, '6h', '1d')}) < {DRIFT} and ({_enough(runtime)})",
        "acceptance length is {{ $value | humanizePercentage }} of the day before",
        "Prompts, chat template, thinking mode, target or drafter changed. `dflash-trt doctor URL --baseline` compares "
        "with a healthy run.",
        is_by_engine=False,
    ),
    Alert(
        "AcceptanceStopsAtPosition",
        "warning",
        "15m",
        _collapsed,
        "accepts {{ $value | humanizePercentage }} of its sixth drafts and most of its first",
        "A sliding window that runs as full attention does this on long prompts (vLLM #40898).",
    ),
    Alert(
        "NoSpeculation",
        "warning",
        "15m",
        # A server without a drafter has no series of drafts at all.
        lambda runtime: f"(({runtime.output_tokens}) > 0) unless on (LABELS) (({runtime.drafts}) > 0)",
        "decodes without drafts",
        "The drafter is off, or its length was set or scheduled to 0.",
    ),
    Alert(
        "RequestsWait",
        "warning",
        "10m",
        lambda runtime: f"({runtime.waiting}) > 0",
        "requests have waited for ten minutes, now {{ $value }}",
        "The batch is full. At that load fewer drafted tokens a step may be faster.",
        is_by_engine=False,
    ),
]
