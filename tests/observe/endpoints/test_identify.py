# SPDX-License-Identifier: Apache-2.0
"""Which runtime answers."""

from __future__ import annotations

import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from tests.observe.endpoints.canned import Page, canned, models


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
