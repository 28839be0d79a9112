# SPDX-License-Identifier: Apache-2.0
"""Each failure of a server is one error, every answer is bounded, and the runtime and its counts are recognised.

Metrics pages are of the names in the runtimes' sources; the counts are made up.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints import client as client_module
from dflash_trt.observe.endpoints.answer_stream import events
from dflash_trt.observe.endpoints.client import Client, base_url
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.endpoints.meters import acceptance_during, meter
from dflash_trt.observe.endpoints.metrics_page import MetricsPage
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, drafting, of_request
from tests.observe.endpoints.canned import Page, canned, models
from tests.observe.traffic.pages import counters


def page(samples: dict[str, float]) -> str:
    """In Prometheus's text format; a label may be part of a name."""
    return "".join(f"{name} {value}\n" for name, value in samples.items())


def measured(owner: str, before: dict[str, Page], after: dict[str, Page]) -> ObservedAcceptance:
    """The meter's reading for a server whose pages change from `before` to `after`."""
    pages = {"/v1/models": models(owner), **before}
    with canned(pages) as url, Client(url) as client, acceptance_during(meter(client, identify(client))) as end:
        pages.update(after)
        return end()


def text(kind: str, passes: int, accepted: tuple[int, ...], tokens: int, *labels: str, requests: int = 0) -> str:
    return "".join(f"{line}\n" for line in counters(kind, passes, accepted, tokens, *labels, requests=requests))


def vllm(passes: int, accepted: tuple[int, ...], tokens: int, engine: int = 0) -> str:
    return text("vllm", passes, accepted, tokens, f'engine="{engine}"', 'model_name="m"')


def test_vllm_counts_by_difference() -> None:
    before = vllm(10, (10, 6, 4), 30) + vllm(1, (0, 0, 0), 1, engine=1)
    after = vllm(14, (14, 10, 7), 45) + vllm(3, (2, 2, 1), 8, engine=1)
    found = measured("vllm", {"/metrics": before}, {"/metrics": after})
    assert (found.source, found.counts, found.output_tokens) == ("counters", drafting(6, 16, 18, (6, 6, 4)), 22)
    assert found.tau_of_drafting_passes == (16 + 6) / 6
    found = measured("vllm", {"/metrics": page({"vllm:generation_tokens_total": 3})}, {})
    assert (found.source, found.tau_of_drafting_passes) == ("not published", None)
    assert "without drafts" in found.how
    found = measured("somebody", {"/metrics": vllm(0, (0,), 0)}, {"/metrics": vllm(2, (1,), 3)})
    assert found.tau_of_drafting_passes == 1.5
    with pytest.raises(EndpointError, match="drafts_total fell between the two readings"):
        measured("vllm", {"/metrics": vllm(10, (0,), 0)}, {"/metrics": vllm(1, (0,), 0)})


def test_it_waits_for_requests_that_are_not_counted_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    scrapes = iter([0, 0, 2, 1, 0])

    def running() -> str:
        number = next(scrapes)
        return vllm(5 - number, (0,), 0) + page({"vllm:num_requests_running": number})

    found = measured("vllm", {"/metrics": running}, {})
    assert found.counts.drafting_passes == 0
    assert next(scrapes, None) is None


def test_sglang_counts_what_requests_kept() -> None:
    found = measured(
        "sglang",
        {"/metrics": text("sglang", 0, (), 91, requests=9)},
        {"/metrics": text("sglang", 20, (), 161, requests=11)},
    )
    assert (found.source, found.counts) == ("counters", drafting(20, 50, None))
    assert found.tau_of_drafting_passes == 3.5  # 70 tokens after the first of 2 requests, in 20 passes
    assert "--enable-metrics" in measured("sglang", {}, {}).how


def test_sglang_gauges_are_sampled_while_it_runs() -> None:
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


def trtllm(drafted: tuple[int, ...], accepted: tuple[int, ...], tokens: int) -> str:
    samples: dict[str, float] = {"trtllm_generation_tokens_total": tokens}
    for name, counts in (("drafted", drafted), ("accepted", accepted)):
        for position, count in enumerate(counts):
            samples[f'trtllm_spec_decode_{name}_tokens_total{{token_position="{position}"}}'] = count
    return page(samples)


def test_tensorrt_llm_counts_by_position_and_by_iteration() -> None:
    path = "/prometheus/metrics"
    found = measured("tensorrt_llm", {path: trtllm((), (), 5)}, {path: trtllm((10, 10, 8), (7, 4, 1), 30)})
    assert found.counts == drafting(10, 12, 28, (7, 4, 1))
    assert (found.tau_of_drafting_passes, found.output_tokens) == (2.2, 25)
    rows = [iteration(14, 5, 2), iteration(0, 0, 0), iteration(14, 5, 2, attentionDpRank=1), {"iter": 9}]
    # Asked by who looks which runtime it is, dropped at the beginning, summed at the end; some releases send texts.
    pages = handed_out([iteration(7, 7, 1)], [iteration(7, 7, 1)], [*rows, json.dumps(iteration(7, 1, 1))])
    found = measured("tensorrt_llm", {"/metrics": pages}, {})
    assert (found.counts, found.tau_of_drafting_passes) == (drafting(3, 6, 21), 3.0)
    rows = [iteration(7, 3, 1, iter=number) for number in (4, 5, 9)]
    found = measured("tensorrt_llm", {"/metrics": handed_out([], [], rows)}, {})
    assert (found.source, found.tau_of_drafting_passes, found.counts) == ("gauges", 4.0, None)
    assert "without 3 iterations" in found.how


def test_a_restart_with_fewer_positions_is_no_traceback() -> None:
    for after in (trtllm((8,), (4,), 100), trtllm((8, 8, 8), (4, 2, 0), 100)):
        with pytest.raises(EndpointError) as error:
            measured(
                "tensorrt_llm",
                {"/prometheus/metrics": trtllm((9, 9, 9), (8, 7, 6), 100)},
                {"/prometheus/metrics": after},
            )
        assert error.value.hint == "the server was restarted in between: measure again"


def test_a_page_that_is_not_there_is_a_404() -> None:
    assert "GET /metrics is a 404" in measured("vllm", {}, {}).how


def iteration(drafted: int, accepted: int, requests: int, **more: object) -> dict[str, object]:
    stats = {"numDraftTokens": drafted, "numAcceptedTokens": accepted, "numRequestsWithDraftTokens": requests}
    return {"specDecodingStats": stats, **more}


def handed_out(*pages: list[object]) -> Callable[[], str]:
    rest = iter(pages)
    return lambda: json.dumps(next(rest, []))


def test_what_is_unknown_is_not_guessed() -> None:
    assert "enable_iter_perf_stats" in measured("tensorrt_llm", {"/metrics": "[]"}, {}).how
    assert "no drafts" in measured("tensorrt_llm", {"/metrics": handed_out([], [], [{"iter": 1}])}, {}).how
    prometheus = page({"trtllm_request_success_total": 3, "trtllm_generation_tokens_total": 9})
    pages: dict[str, Page] = {"/prometheus/metrics": prometheus, "/metrics": handed_out([], [], [iteration(7, 3, 1)])}
    assert measured("tensorrt_llm", pages, {}).how.startswith("specDecodingStats")
    assert measured("Triton Inference Server", {}, {}).source == "not published"
    assert measured("somebody", {}, {}).source == "not published"


@pytest.mark.parametrize("position", ["²", "-1", "9" * 5001])
def test_what_is_no_position(position: str) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    published = vllm(1, (1,), 2) + page({f'{name}{{engine="0",model_name="m",position="{position}"}}': 1})
    with pytest.raises(EndpointError, match=r"by position 0, 1, \.\.\., found"):
        MetricsPage.parse(published.encode(), "here").positions(name, "position")


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


FOREVER = time.perf_counter() + 1e9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/prefix", "https://h/prefix"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_urls(given: str, expected: str) -> None:
    assert base_url(given) == expected


@pytest.mark.parametrize("given", ["ftp://h", "http://", "http://h:x", "http://h?q", "http://u:p@h", "http://h:70000"])
def test_what_is_no_url(given: str) -> None:
    with pytest.raises(EndpointError, match="expected the URL of a server"):
        base_url(given)


def test_nothing_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # the port never listens
        with (
            Client(f"127.0.0.1:{taken.getsockname()[1]}") as client,
            pytest.raises(EndpointError, match=r"^cannot connect to http.*: Connection refused\n") as error,
        ):
            identify(client)
    assert error.value.hint == "is it running, and is the port right?"
    # The port is not what is wrong
    with Client("http://no-such-host.invalid:8000") as client, pytest.raises(EndpointError) as error:
        identify(client)
    assert error.value.hint == "is the host's name right, and can this machine resolve it?"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout=0.05) as client, pytest.raises(EndpointError, match="timed out waiting for an answer"):
            client.get("/v1/models")


def test_tls_where_there_is_none() -> None:
    with (
        canned({}) as url,
        Client(url.replace("http:", "https:")) as client,
        pytest.raises(EndpointError, match="SSL") as error,
    ):
        client.get("/v1/models")
    assert "is it https?" in str(error.value.hint)


@pytest.mark.parametrize(
    ("pages", "message", "hint"),
    [
        ({"/v1/models": (401, "who are you")}, "expected 200, found 401: 'who are you'", "--api-key-file"),
        ({"/v1/models": (404, "no")}, "expected 200, found 404", "OpenAI-compatible"),
        ({"/v1/models": (302, "")}, "found 302", "not followed"),
        ({"/v1/models": "<html>"}, "expected a JSON object", None),
        ({"/v1/models": "[]"}, "expected a JSON object, found list", None),
        ({"/v1/models": '{"data": []}'}, "expected a list of models", None),
        ({"/v1/models": '{"data": [{"id": "a"}, {"id": "b"}]}'}, "expected one model, found a, b", "--model"),
        ({"/v2": '{"name": "triton", "version": "2.60"}'}, "found Triton's own protocol", "openai_frontend"),
    ],
)
def test_what_is_no_such_api(pages: dict[str, Page], message: str, hint: str | None) -> None:
    with canned(pages) as url, Client(url) as client, pytest.raises(EndpointError) as error:
        identify(client)
    assert message in error.value.message
    assert hint is None or hint in str(error.value.hint)


def test_the_model_must_be_served() -> None:
    refused = pytest.raises(EndpointError, match="expected the model 'x', found m")
    with canned({"/v1/models": models("vllm")}) as url, Client(url) as client, refused:
        identify(client, model="x")


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PAGE_BYTES", 100)
    refused = pytest.raises(EndpointError, match="at most 100 bytes")
    with canned({"/metrics": "x" * 101}) as url, Client(url) as client, refused:
        client.get("/metrics")


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"data: {}\n\n", "broke off"),
        (b"data: {\n\n", "expected an event of a stream"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
    ],
)
def test_streams_that_fail(stream: bytes, message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        list(events([stream], "here", FOREVER))


def test_streams_end_in_time_and_their_pieces_anywhere() -> None:
    with pytest.raises(EndpointError, match="in time"):
        list(events([b"data: {}\n\n"], "here", time.perf_counter() - 1))
    stream = b': hello\r\nevent: x\r\ndata: {"a": "\xc3\xbc"}\r\n\r\ndata:{"b": 1}\n\ndata: [DONE]\n\nrest'
    pieces = [stream[index : index + 1] for index in range(len(stream))]
    assert list(events(pieces, "here", FOREVER)) == [{"a": "ü"}, {"b": 1}]


@pytest.mark.parametrize(
    ("owner", "pages", "expected"),
    [
        ("vllm", {"/version": '{"version": "0.33.0"}'}, ("vllm", "0.33.0")),
        ("sglang", {"/server_info": '{"version": "0.5.23"}'}, ("sglang", "0.5.23")),
        ("sglang", {"/get_server_info": '{"version": "0.4.1"}'}, ("sglang", "0.4.1")),
        ("tensorrt_llm", {"/version": '{"version": "1.3.0rc27"}'}, ("tensorrt-llm", "1.3.0rc27")),
        ("Triton Inference Server", {"/v2": '{"name": "triton", "version": "2.60"}'}, ("triton", "2.60")),
        ("a router", {"/metrics": "# HELP x y\nsglang:token_usage 0.1\n"}, ("sglang", None)),
        ("a router", {"/prometheus/metrics": "trtllm_num_requests_running 0\n"}, ("tensorrt-llm", None)),
        ("somebody", {}, ("unknown", None)),
    ],
)
def test_runtimes(owner: str, pages: dict[str, Page], expected: tuple[str, str | None]) -> None:
    with canned({"/v1/models": models(owner), **pages}) as url, Client(f"{url}/v1") as client:
        found = identify(client)
    assert ((found.kind, found.version), found.model) == (expected, "m")
