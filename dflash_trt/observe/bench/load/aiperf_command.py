# SPDX-License-Identifier: Apache-2.0
"""AIPerf's command line for the load on one server at one concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_trt.observe.bench.prompts.conversation import Conversation
from dflash_trt.observe.bench.run_record import Arrivals, RequestSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AiperfLoad:
    """The load on one server at one concurrency."""

    url: str
    model: str
    prompts: Sequence[Conversation]
    request: RequestSettings
    concurrency: int
    seed: int
    timeout_seconds: float
    api_key: str | None = None
    goodput: str | None = None
    arrivals: Arrivals | None = None
    """None: closed loop."""

    @property
    def is_replayed(self) -> bool:
        """Whether prompts begin at their timestamps."""
        return self.arrivals is not None and self.arrivals.request_rate is None

    @property
    def num_requests(self) -> int:
        """Planned requests; a conversation ends early if one of its requests fails."""
        return sum(prompt.num_requests for prompt in self.prompts)


def body_fields(request: RequestSettings, seed: int) -> dict[str, object]:
    """All fields of a request's body except the prompt."""
    fields: dict[str, object] = {"max_tokens": request.max_tokens, "temperature": request.temperature}
    if request.temperature > 0:
        fields["seed"] = seed
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking == "on"}
    return fields | request.extra


def _arrivals(arrivals: Arrivals | None) -> list[str]:
    """AIPerf's options of an open loop."""
    if arrivals is None:
        return []
    if arrivals.request_rate is None:
        return ["--fixed-schedule", "--fixed-schedule-auto-offset"]
    return ["--request-rate", f"{arrivals.request_rate:g}", "--arrival-pattern", arrivals.arrival_pattern]


def command(program: Path, load: AiperfLoad, prompts: Path, tokenizer: Path, output: Path) -> list[str]:
    """AIPerf's command line; without the key, because other users may see the words."""
    return [
        str(program), "profile",
        "--model", load.model, "--url", load.url,
        "--endpoint-type", "chat" if load.request.template == "chat" else "completions",
        "--streaming", "--use-server-token-count", "--tokenizer", str(tokenizer),
        "--custom-dataset-type", "mooncake-trace" if load.is_replayed else "multi-turn", "--input-file", str(prompts),
        "--dataset-sampling-strategy", "sequential", "--conversation-num", str(len(load.prompts)),
        "--concurrency", str(load.concurrency), *_arrivals(load.arrivals),
        *(["--goodput", load.goodput] if load.goodput is not None else []),
        "--random-seed", str(load.seed),
        "--extra-inputs", msgspec.json.encode(body_fields(load.request, load.seed)).decode(),
        "--request-timeout-seconds", str(load.timeout_seconds),
        "--no-gpu-telemetry", "--no-server-metrics", "--ui-type", "none",
        "--output-artifact-dir", str(output),
    ]  # fmt: skip
