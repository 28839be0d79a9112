# SPDX-License-Identifier: Apache-2.0
"""Errors of a body's fields name the whole path to the field."""

from typing import Annotated, Any

import msgspec
import pytest

from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.request.decoding import decode_fields
from dflash_trt.runtime.server.request.request_fields import StreamOptions


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    left: int


class Body(msgspec.Struct, forbid_unknown_fields=True):
    stream_options: StreamOptions | None = None
    pair: Pair | None = None
    pairs: list[Pair] = []
    texts: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream_options": {"usage": True}}, "stream_options.usage: unknown field"),
        ({"stream_options": {"a`b": 1}}, "stream_options.a`b: unknown field"),
        ({"pair": {}}, "pair.left: the field is missing"),
        ({"pairs": [{"left": 1}, {}]}, "pairs[1].left: the field is missing"),
        ({"pairs": [{"left": 1, "x": 1}]}, "pairs[0].x: unknown field"),
        ({"pair": {"lefd": 1}}, "pair.lefd: unknown field; did you mean left?"),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages: unknown field; did you mean include_usage?",
        ),
        ({"text": ["a"]}, "text: unknown field; did you mean texts?"),
        ({"x": 1}, "x: unknown field"),
        ({"texts": []}, "texts: expected at least 1 item, found 0"),
    ],
)
def test_errors_name_the_path_to_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        decode_fields(fields, Body, {})
    assert str(refused.value) == message
