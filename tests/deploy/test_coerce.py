# SPDX-License-Identifier: Apache-2.0
"""What pydantic takes for a number or a flag, the linter takes, and it reads the same; what it refuses, it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.deploy.schema import load_schema
from dflash_trt.deploy.schema_check import check_schema, coerce

pydantic = pytest.importorskip("pydantic", reason="pydantic comes with tensorrt_llm")
SCHEMA = load_schema("trtllm")
FIELDS = {
    "max_seq_len": int | None,
    "batch_wait_timeout_ms": float,
    "enable_attention_dp": bool,
    "prefill_capture_num_tokens": list[int] | None,
}
MODELS = {key: pydantic.create_model(key, **{key: (kind, ...)}) for key, kind in FIELDS.items()}
SCALARS = (
    st.none() | st.booleans() | st.integers(0, 99) | st.floats(0, 99) | st.integers(0, 9).map(float)
    | st.sampled_from(["64", "64.0", " 64 ", "1_000", "0x10", "", "6e1", "+6", "0.8", "1.", "yes", "Off", " true "])
    | st.just("9" * 5001)
)  # fmt: skip


def agrees(key: str, value: Any) -> None:
    document, findings = coerce(SCHEMA, {key: value})
    is_taken = not list(check_schema(SCHEMA, document))
    try:
        expected = getattr(MODELS[key](**{key: value}), key)
    except pydantic.ValidationError:
        assert not is_taken
        assert not [finding for finding in findings if finding.key == key]
        return
    assert is_taken
    assert document[key] == expected
    assert [type(item) for item in _items(document[key])] == [
        type(item) for item in _items(value if not findings else expected)
    ]


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@given(key=st.sampled_from(["max_seq_len", "batch_wait_timeout_ms", "enable_attention_dp"]), value=SCALARS)
def test_scalars(key: str, value: Any) -> None:
    agrees(key, value)


@given(value=st.lists(SCALARS.filter(lambda v: v is not None), min_size=1, max_size=1))
def test_lists(value: list[Any]) -> None:
    agrees("prefill_capture_num_tokens", value)


def test_what_is_read_otherwise_is_said() -> None:
    document = {
        "max_seq_len": "64",
        "kv_cache_config": {"dtype": "FP8", "enable_block_reuse": 0},
        "load_format": "dummy",
    }
    read, findings = coerce(SCHEMA, document)
    assert read == {
        "max_seq_len": 64, "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False}, "load_format": "DUMMY",
    }  # fmt: skip
    assert [finding.key for finding in findings] == ["max_seq_len", "kv_cache_config.enable_block_reuse"]


def test_the_other_runtimes_read_what_stands_there() -> None:
    assert coerce(load_schema("vllm"), {"max_model_len": "64"}) == ({"max_model_len": "64"}, [])
    assert math.isnan(coerce(SCHEMA, {"batch_wait_timeout_ms": "nan"})[0]["batch_wait_timeout_ms"])
