# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a server is one error, no answer is without a bound, and the runtime is told."""

from __future__ import annotations

import socket
import time

import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints import client as client_module
from dflash_trt.observe.endpoints.answer import events
from dflash_trt.observe.endpoints.client import Client, base_url
from dflash_trt.observe.endpoints.identify import identify
from tests.observe.endpoints.canned import Page, canned, models

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
        taken.bind(("127.0.0.1", 0))  # and never listens
        with (
            Client(f"127.0.0.1:{taken.getsockname()[1]}") as client,
            pytest.raises(EndpointError, match="expected a server, found: Connection refused\n") as error,
        ):
            identify(client)
    assert error.value.hint == "is it running, and is the port right?"


def test_a_host_that_nobody_knows() -> None:
    """The port is not what is wrong."""
    with Client("http://no-such-host.invalid:8000") as client, pytest.raises(EndpointError) as error:
        identify(client)
    assert error.value.hint == "is the host's name right, and can this machine resolve it?"


def test_a_server_that_says_nothing() -> None:
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
    ("page", "message", "hint"),
    [
        ((401, "who are you"), "expected 200, found 401: 'who are you'", "--api-key-file"),
        ((404, "no"), "expected 200, found 404", "OpenAI-compatible"),
        ((302, ""), "found 302", "not followed"),
        ("<html>", "expected a JSON object", None),
        ("[]", "expected a JSON object, found list", None),
        ('{"data": []}', "expected a list of models", None),
        ('{"data": [{"id": "a"}, {"id": "b"}]}', "expected one model, found a, b", "--model"),
    ],
)
def test_what_is_no_such_api(page: str | tuple[int, str], message: str, hint: str | None) -> None:
    with canned({"/v1/models": page}) as url, Client(url) as client, pytest.raises(EndpointError) as error:
        identify(client)
    assert message in error.value.message
    assert hint is None or hint in str(error.value.hint)


def test_the_model_must_be_served() -> None:
    with (
        canned({"/v1/models": models("vllm")}) as url,
        Client(url) as client,
        pytest.raises(EndpointError, match="expected the model 'x', found m"),
    ):
        identify(client, model="x")


def test_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_PAGE_BYTES", 100)
    with (
        canned({"/metrics": "x" * 101}) as url,
        Client(url) as client,
        pytest.raises(EndpointError, match="at most 100 bytes"),
    ):
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


def test_streams_end_in_time() -> None:
    with pytest.raises(EndpointError, match="in time"):
        list(events([b"data: {}\n\n"], "here", time.perf_counter() - 1))


def test_pieces_may_end_anywhere() -> None:
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


def test_tritons_own_protocol_is_named() -> None:
    with (
        canned({"/v2": '{"name": "triton", "version": "2.60"}'}) as url,
        Client(url) as client,
        pytest.raises(EndpointError, match="found Triton's own protocol") as error,
    ):
        identify(client)
    assert "openai_frontend" in str(error.value.hint)
