# SPDX-License-Identifier: Apache-2.0
"""/metrics: vLLM's names, and the decoder's own counts."""

from __future__ import annotations

from operator import attrgetter

from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.server.live import MODEL, Live

# Of vLLM's docs (usage/metrics) and sources (v1/metrics/loggers.py, v1/spec_decode/metrics.py).
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "acceptance.drafting_passes",
    "vllm:spec_decode_num_draft_tokens_total": "acceptance.proposed",
    "vllm:spec_decode_num_accepted_tokens_total": "acceptance.accepted",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
)  # fmt: skip
Samples = dict[tuple[str, str], float]


def scrape(live: Live) -> Samples:
    """By name and the last label's value."""
    samples: Samples = {}
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith("vllm:"):
                assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
            samples[sample.name, ",".join(labels.values())] = sample.value
    return samples


def test_counters_are_the_decoders(live: Live) -> None:
    before = scrape(live)
    answers = [
        live.complete(prompt="def f(", max_tokens=30, temperature=0),
        live.complete(prompt="def f(", max_tokens=30, temperature=0, draft_length=0),  # counts for no draft
        live.complete(prompt=["import os", "class A"], max_tokens=9, temperature=0, ignore_eos=True),
    ]
    live.events(prompt="def f(", max_tokens=30, temperature=0)
    after, readings = scrape(live), live.llm.metrics()
    for name, field in COUNTERS.items():
        assert after[name, ""] == attrgetter(field)(readings), name
    for position in range(7):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert after[name, str(position)] == readings.acceptance.accepted_by_position[position]
    grown = {key: after[key] - before[key] for key in after if key in before}
    assert grown["vllm:prompt_tokens_total", ""] == sum(answer["usage"]["prompt_tokens"] for answer in answers) + 3
    figures = answers[0]["metrics"]["speculative_decoding"]
    assert grown["vllm:spec_decode_num_drafts_total", ""] > 2 * figures["num_spec_steps"]
    assert sum(grown["vllm:request_success_total", reason] for reason in ("stop", "length", "abort")) == 5
    for name in HISTOGRAMS:
        count = grown[f"{name}_count", ""]
        assert count == 5 if name != "vllm:inter_token_latency_seconds" else count == readings_steps(grown)
        assert after[f"{name}_bucket", "+Inf"] == after[f"{name}_count", ""]


def readings_steps(grown: Samples) -> float:
    """Verify passes: what came after each first token."""
    return grown["vllm:inter_token_latency_seconds_bucket", "+Inf"]


def test_times_between_steps_are_counted_once(live: Live) -> None:
    before, steps = scrape(live), live.llm.metrics().acceptance.passes
    live.complete(prompt="def f(", max_tokens=30, temperature=0)
    live.events(prompt="def f(", max_tokens=30, temperature=0)
    name = "vllm:inter_token_latency_seconds_count", ""
    assert scrape(live)[name] - before[name] == live.llm.metrics().acceptance.passes - steps
