# SPDX-License-Identifier: Apache-2.0
"""What runtimes publish, in our words. The pages are of the names in their sources; the counts are made up."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints import meters
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.endpoints.meters import acceptance_during, meter
from dflash_trt.observe.endpoints.observed_acceptance import MetricsPage, ObservedAcceptance, drafting, of_request
from tests.observe.endpoints.canned import Page, canned, models


def page(samples: dict[str, float]) -> str:
    """In Prometheus's text format; a label may be part of a name."""
    return "".join(f"{name} {value}\n" for name, value in samples.items())


def measured(owner: str, before: dict[str, Page], after: dict[str, Page]) -> ObservedAcceptance:
    """What the meter says of a server whose pages change from `before` to `after`."""
    pages = {"/v1/models": models(owner), **before}
    with canned(pages) as url, Client(url) as client, acceptance_during(meter(client, identify(client))) as end:
        pages.update(after)
        return end()


def vllm(drafts: int, proposed: int, accepted: int, positions: tuple[int, ...], tokens: int, engine: int = 0) -> str:
    label = f'{{engine="{engine}",model_name="m"}}'
    samples: dict[str, float] = {
        f"vllm:spec_decode_num_drafts_total{label}": drafts,
        f"vllm:spec_decode_num_draft_tokens_total{label}": proposed,
        f"vllm:spec_decode_num_accepted_tokens_total{label}": accepted,
        f"vllm:generation_tokens_total{label}": tokens,
    }
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    for position, count in enumerate(positions):
        samples[f'{name}{{engine="{engine}",model_name="m",position="{position}"}}'] = count
    return page(samples)


def test_vllm_counts_by_difference_over_engines() -> None:
    before = vllm(10, 70, 20, (10, 6, 4), 30) + vllm(1, 7, 0, (0, 0, 0), 1, engine=1)
    after = vllm(14, 98, 31, (14, 10, 7), 45) + vllm(3, 21, 5, (2, 2, 1), 8, engine=1)
    found = measured("vllm", {"/metrics": before}, {"/metrics": after})
    assert (found.source, found.counts, found.output_tokens) == ("counters", drafting(6, 16, 42, (6, 6, 4)), 22)
    assert found.tau_of_drafting_passes == (16 + 6) / 6


def test_vllm_without_drafts() -> None:
    found = measured("vllm", {"/metrics": page({"vllm:generation_tokens_total": 3})}, {})
    assert (found.source, found.tau_of_drafting_passes) == ("not published", None)
    assert "without drafts" in found.how


def test_vllm_behind_a_router() -> None:
    found = measured("somebody", {"/metrics": vllm(0, 0, 0, (0,), 0)}, {"/metrics": vllm(2, 2, 1, (1,), 3)})
    assert found.tau_of_drafting_passes == 1.5


def test_a_restart_is_no_negative_count() -> None:
    with pytest.raises(EndpointError, match="found 1 after 10"):
        measured("vllm", {"/metrics": vllm(10, 0, 0, (), 0)}, {"/metrics": vllm(1, 0, 0, (), 0)})


def test_it_waits_for_requests_that_are_not_counted_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes = iter([0, 0, 2, 1, 0])

    def running() -> str:
        number = next(scrapes)
        return vllm(5 - number, 0, 0, (), 0) + page({"vllm:num_requests_running": number})

    found = measured("vllm", {"/metrics": running}, {})
    assert found.counts.drafting_passes == 0
    assert next(scrapes, None) is None


def sglang(steps: int, tokens: int, requests: int) -> str:
    samples = {"sglang:generation_tokens_total": tokens, "sglang:num_requests_total": requests}
    return page({**samples, **({"sglang:spec_verify_calls_total": steps} if steps else {})})


def test_sglang_counts_what_requests_kept() -> None:
    found = measured("sglang", {"/metrics": sglang(0, 100, 9)}, {"/metrics": sglang(20, 172, 11)})
    assert (found.source, found.counts) == ("counters", drafting(20, 50, None))
    assert found.tau_of_drafting_passes == 3.5  # 70 tokens behind the first of 2 requests, in 20 passes


def test_sglang_gauges_are_sampled_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters.SglangMeter, "sample_seconds", None)
    label = '{model_name="m",tp_rank="0"}'
    pages = {"/v1/models": models("sglang"), "/metrics": page({f"sglang:spec_accept_length{label}": 9})}
    with canned(pages) as url, Client(url) as client:
        gauge = meter(client, identify(client))
        gauge.begin()
        gauge.sample()  # idle: of an interval before
        for value in (2.0, 3.0):
            running = {f"sglang:num_running_reqs{label}": 1, f"sglang:spec_accept_length{label}": value}
            pages["/metrics"] = page(running)
            gauge.sample()
        pages["/metrics"] = page({f"sglang:num_running_reqs{label}": 0})
        found = gauge.end()
    assert (found.source, found.tau_of_drafting_passes, found.counts) == ("gauges", 2.5, None)


def test_sglang_with_neither() -> None:
    assert "--enable-metrics" in measured("sglang", {}, {}).how


def trtllm(drafted: tuple[int, ...], accepted: tuple[int, ...], tokens: int) -> str:
    samples: dict[str, float] = {"trtllm_generation_tokens_total": tokens}
    for name, counts in (("drafted", drafted), ("accepted", accepted)):
        for position, count in enumerate(counts):
            samples[f'trtllm_spec_decode_{name}_tokens_total{{token_position="{position}"}}'] = count
    return page(samples)


def test_tensorrt_llm_counts_by_position() -> None:
    path = "/prometheus/metrics"
    found = measured("tensorrt_llm", {path: trtllm((), (), 5)}, {path: trtllm((10, 10, 8), (7, 4, 1), 30)})
    assert found.counts == drafting(10, 12, 28, (7, 4, 1))
    assert (found.tau_of_drafting_passes, found.output_tokens) == (2.2, 25)


def iteration(drafted: int, accepted: int, requests: int, **more: object) -> dict[str, object]:
    stats = {"numDraftTokens": drafted, "numAcceptedTokens": accepted, "numRequestsWithDraftTokens": requests}
    return {"specDecodingStats": stats, **more}


def handed_out(*pages: list[object]) -> Callable[[], str]:
    rest = iter(pages)
    return lambda: json.dumps(next(rest, []))


def test_tensorrt_llm_hands_iterations_out_once() -> None:
    rows = [iteration(14, 5, 2), iteration(0, 0, 0), iteration(14, 5, 2, attentionDpRank=1), {"iter": 9}]
    # Asked by who looks which runtime it is, dropped at the beginning, summed at the end; some releases send texts.
    pages = handed_out([iteration(7, 7, 1)], [iteration(7, 7, 1)], [*rows, json.dumps(iteration(7, 1, 1))])
    found = measured("tensorrt_llm", {"/metrics": pages}, {})
    assert (found.counts, found.tau_of_drafting_passes) == (drafting(3, 6, 21), 3.0)


def test_tensorrt_llm_iterations_that_are_missed_make_it_a_sample() -> None:
    rows = [iteration(7, 3, 1, iter=number) for number in (4, 5, 9)]
    found = measured("tensorrt_llm", {"/metrics": handed_out([], [], rows)}, {})
    assert (found.source, found.tau_of_drafting_passes, found.counts) == ("gauges", 4.0, None)
    assert "without 3 iterations" in found.how


def test_tensorrt_llm_of_a_release_without_counters_by_position() -> None:
    prometheus = page({"trtllm_request_success_total": 3, "trtllm_generation_tokens_total": 9})
    pages: dict[str, Page] = {"/prometheus/metrics": prometheus, "/metrics": handed_out([], [], [iteration(7, 3, 1)])}
    assert measured("tensorrt_llm", pages, {}).how.startswith("specDecodingStats")


def test_tensorrt_llm_without_statistics() -> None:
    assert "enable_iter_perf_stats" in measured("tensorrt_llm", {"/metrics": "[]"}, {}).how
    assert "no drafts" in measured("tensorrt_llm", {"/metrics": handed_out([], [], [{"iter": 1}])}, {}).how


def test_what_is_unknown_is_not_guessed() -> None:
    assert measured("Triton Inference Server", {}, {}).source == "not published"
    assert measured("somebody", {}, {}).source == "not published"


@pytest.mark.parametrize("position", ["²", "-1", "9" * 5001])
def test_what_is_no_position(position: str) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text = vllm(1, 1, 1, (1,), 2) + page({f'{name}{{engine="0",model_name="m",position="{position}"}}': 1})
    with pytest.raises(EndpointError, match=r"by position 0, 1, \.\.\., found"):
        MetricsPage.parse(text.encode(), "here").positions(name, "position")


def test_one_request() -> None:
    figures = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
    found = of_request({**figures, "acceptance_histogram": [1, 1, 1, 1]}, "here")
    assert (found.counts.accepted_by_position, found.tau_of_drafting_passes) == ((3, 2, 1), 2.5)
    with pytest.raises(EndpointError, match=r"expected counts in speculative_decoding, found .*num_spec_steps"):
        of_request({**figures, "num_spec_steps": -1}, "here")


@pytest.mark.parametrize("text", ["vllm:spec_decode_num_drafts_total{ 3", "x y z"])
def test_what_is_no_metrics_page(text: str) -> None:
    with canned({"/v1/models": models("vllm"), "/metrics": text}) as url, Client(url) as client:
        assert meter(client, identify(client)).end().source == "unreadable"
