# SPDX-License-Identifier: Apache-2.0
"""Identifies the runtime at an address by its list of models or the names of its metrics.

`owned_by` of GET /v1/models: vLLM's entrypoints/openai protocol says "vllm", SGLang's "sglang", TensorRT-LLM's
serve/openai_protocol.py "tensorrt_llm", Triton's OpenAI frontend "Triton Inference Server", ours "dflash-trt".
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import EndpointError, shown
from dflash_trt.observe.endpoints.client import Client

ServerKind = Literal["dflash-trt", "vllm", "sglang", "tensorrt-llm", "triton", "unknown"]
OWNERS: dict[str, ServerKind] = {
    "dflash-trt": "dflash-trt",
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "Triton Inference Server": "triton",
}
METRICS: dict[bytes, ServerKind] = {
    b"vllm:": "vllm", b"sglang:": "sglang", b"trtllm_": "tensorrt-llm", b"nv_inference_": "triton",
}  # fmt: skip
ABOUT_PATHS: dict[ServerKind, tuple[str, ...]] = {
    "dflash-trt": ("/version",),
    "vllm": ("/version",),
    "tensorrt-llm": ("/version",),
    "sglang": ("/server_info", "/get_server_info"),  # the second until 0.5
    "triton": ("/v2",),
    "unknown": ("/version",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A server's runtime and model, as it reports them."""

    kind: ServerKind
    version: str | None
    model: str
    """The name that requests must give."""
    max_model_len: int | None
    """Maximum tokens of prompt and answer, if reported."""
    unscaled_length: int | None = None
    """Tokens up to which the draft's RoPE is not scaled, if reported."""
    num_draft_tokens: int | None = None
    """Maximum draft tokens of a step, if reported (SGLang counts the last verified token, too)."""
    target: str = ""
    """Path or repository id that the model was loaded from, if reported; else its name."""


def identify(client: Client, *, model: str | None = None) -> Runtime:
    """The runtime and its model: the only one, or `model`; raises EndpointError if there is no such API or model."""
    try:
        document = client.get_object("/v1/models")
    except EndpointError as error:
        if error.status == 404 and _is_triton(client):
            raise EndpointError(
                f"{client.url}: expected an OpenAI-compatible API, found Triton's own protocol",
                hint="start Triton's OpenAI frontend (openai_frontend/main.py), and give its address",
                status=404,
            ) from None
        raise
    card = _chosen(_cards(document, f"{client.url}/v1/models"), model, client.url)
    kind = OWNERS.get(str(card.get("owned_by"))) or _kind_by_metrics(client)
    length, unscaled, drafts = (_count(card, name) for name in ("max_model_len", "unscaled_length", "num_spec_tokens"))
    about = _about(client, kind)
    window, version = _count(about, "speculative_num_draft_tokens"), about.get("version")
    return Runtime(
        kind=kind, version=version if isinstance(version, str) else None, model=str(card["id"]),
        target=str(card.get("root") or about.get("model_path") or card["id"]), max_model_len=length,
        unscaled_length=unscaled, num_draft_tokens=window - 1 if window else drafts,
    )  # fmt: skip


def _count(card: dict[str, object], name: str) -> int | None:
    value = card.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _cards(document: dict[str, object], where: str) -> list[dict[str, object]]:
    data = document.get("data")
    cards = [card for card in data if isinstance(card, dict) and "id" in card] if isinstance(data, list) else []
    if not cards:
        raise EndpointError(f"{where}: expected a list of models, found {shown(document)}")
    return cards


def _chosen(cards: list[dict[str, object]], model: str | None, url: str) -> dict[str, object]:
    names = [str(card["id"]) for card in cards]
    if model is None and len(cards) > 1:
        raise EndpointError(f"{url}: expected one model, found {', '.join(names)}", hint="say which with --model")
    if model is not None and model not in names:
        raise EndpointError(f"{url}: expected the model {shown(model)}, found {', '.join(names)}")
    return cards[0 if model is None else names.index(model)]


def _kind_by_metrics(client: Client) -> ServerKind:
    """For servers with a router, which owns its models itself."""
    for path in ("/metrics", "/prometheus/metrics"):
        with suppress(EndpointError):
            page = client.get(path)
            for prefix, kind in METRICS.items():
                if page.startswith(prefix) or b"\n" + prefix in page:
                    return kind
    return "unknown"


def _is_triton(client: Client) -> bool:
    with suppress(EndpointError):
        return client.get_object("/v2").get("name") == "triton"
    return False


def _about(client: Client, kind: ServerKind) -> dict[str, object]:
    """The server's version and, for SGLang, its arguments."""
    for path in ABOUT_PATHS[kind]:
        with suppress(EndpointError):
            about = client.get_object(path)
            if isinstance(about.get("version"), str):
                return about
    return {}
