# SPDX-License-Identifier: Apache-2.0
"""The schema files are complete, and read alike by every check.

Command lines and values of another type are read as the runtimes do: what pydantic takes for a number or a flag, the
linter takes, and it reads the same; what it refuses, it refuses.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.command_text import command_text
from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.resolved_deployment import ServedModels
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.schema import Runtime, Schema, load_schema, schemas, validator_class, versions
from dflash_trt.deploy.schema_check import BOUNDS, WORDS, check_schema, coerce
from dflash_trt.deploy.script import servers
from dflash_trt.deploy.sizes import draft_sizes, target_sizes
from dflash_trt.errors import ConfigError
from tests.deploy.deployments import SERVED, rendered


@pytest.mark.parametrize(("name", "runtime"), [served for served in SERVED if served[1] != "trtllm"])
def test_round_trip(name: str, runtime: Runtime) -> None:
    arguments = rendered(name, runtime).arguments
    (server,) = servers(command_text(runtime, arguments))
    parsed, findings = parse_arguments(server.words, load_schema(runtime, None))
    assert (server.runtime, findings) == (runtime, [])
    given = {key: value for key, value in arguments.items() if runtime == "vllm" or value is not False}
    thinking = "default_chat_template_kwargs"  # SGLang's schema says no type: the word stays as it is
    if runtime == "sglang" and thinking in given:
        parsed[thinking] = json.loads(parsed[thinking])
    assert parsed == given


SCHEMA = load_schema("trtllm")
FIELDS = {
    "max_seq_len": int | None, "batch_wait_timeout_ms": float, "enable_attention_dp": bool,
    "prefill_capture_num_tokens": list[int] | None,
}  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(0, 99) | st.floats(0, 99) | st.integers(0, 9).map(float)
    | st.sampled_from(["64", "64.0", " 64 ", "1_000", "0x10", "", "6e1", "+6", "0.8", "1.", "yes", "Off", " true "])
    | st.just("9" * 5001)
)  # fmt: skip


def agrees(key: str, value: Any) -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with tensorrt_llm")
    model = pydantic.create_model(key, **{key: (FIELDS[key], ...)})
    document, findings = coerce(SCHEMA, {key: value})
    is_taken = not list(check_schema(SCHEMA, document))
    try:
        expected = getattr(model(**{key: value}), key)
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
    assert coerce(load_schema("vllm"), {"max_model_len": "64"}) == ({"max_model_len": "64"}, [])
    assert math.isnan(coerce(SCHEMA, {"batch_wait_timeout_ms": "nan"})[0]["batch_wait_timeout_ms"])


ALL = pytest.mark.parametrize("schema", schemas().values(), ids=lambda schema: f"{schema.runtime}-{schema.version}")


def definitions(schema: Schema) -> list[tuple[str, dict[str, Any]]]:
    return list(schema.json["$defs"].items())


@ALL
def test_every_file_is_json_schema(schema: Schema) -> None:
    """Valid by the metaschema, with references that resolve and known extensions."""
    validator_class().check_schema(schema.json)
    text = json.dumps(schema.json)
    for reference in set(re.findall(r'"\$ref": "#/([^"]*)"', text)):
        node = schema.json
        for key in reference.split("/"):
            node = node[key]
    assert set(re.findall(r'"(x-[a-z]+)":', text)) <= {
        "x-runtime", "x-version", "x-rules", "x-source", "x-open", "x-newer", "x-coerces", "x-case", "x-removed",
    }  # fmt: skip


@ALL
def test_every_definition_is_closed_and_typed(schema: Schema) -> None:
    for name, definition in definitions(schema):
        assert definition["title"] == name
        assert definition["additionalProperties"] is False
        for key, described in definition["properties"].items():
            types = described.get("type", [])
            types = {types} if isinstance(types, str) else set(types)
            assert types <= WORDS.keys(), key
            assert not described.keys() & BOUNDS.keys() or {"integer", "number"} & types, key
            assert "object" in types or not described.keys() & {"properties", "allOf", "required"}, key


@ALL
def test_every_default_is_valid(schema: Schema) -> None:
    """A default that the schema itself refuses is a slip of the reading."""
    for name, definition in definitions(schema):
        properties = definition["properties"]
        document = {key: described["default"] for key, described in properties.items() if "default" in described}
        root = msgspec.structs.replace(schema, json=schema.json | {"$ref": f"#/$defs/{name}"})
        assert [str(finding) for finding in check_schema(root, document)] == []


@ALL
def test_every_definition_and_rule_names_its_source(schema: Schema) -> None:
    for _, definition in definitions(schema):
        assert definition["x-source"]["repository"]
        assert definition["x-source"]["file"]
    for rule in schema.rules.values():
        assert rule["source"]


def test_settings_and_keys_of_the_releases() -> None:
    schema = load_schema("trtllm", None)
    document: dict[str, Any] = {"speculative_config": {"decoding_type": "DFlash"}, "kv_cache_config": {"dtype": "fp8"}}
    assert schema.setting(document, "speculative_config.attention_backend") == "VANILLA"
    assert schema.setting(document, "speculative_config.context_recompute_tail") == 0
    assert schema.setting(document, "kv_cache_config.dtype") == "fp8"
    assert schema.setting(document, "kv_cache_config.enable_block_reuse") is True
    assert schema.setting(document, "max_batch_size") == 2048
    assert schema.setting(document, "cuda_graph_config.enable_padding") is False
    assert schema.setting({}, "speculative_config.attention_backend") is None
    # Keys are those on the pages of the two releases
    old, new = (set(load_schema("trtllm", v).properties("DFlashDecodingConfig")) for v in versions("trtllm"))
    assert new - old == {"moe_backend", "spec_dec_variant", "context_recompute_tail", "skip_ctx_buffer_budget_check"}
    assert old - new == set()
    assert "block_size" not in new
    assert load_schema("trtllm", None).version == "1.4.0rc1"


@pytest.mark.parametrize(
    ("runtime", "release", "nearest"),
    [
        ("trtllm", "1.4.0rc4", "1.4.0rc1"), ("trtllm", "1.4.0", "1.4.0rc1"), ("trtllm", "1.3.0rc30", "1.3.0rc27"),
        ("trtllm", "1.2.1", "1.3.0rc27"), ("vllm", "0.32.0", "0.33.0"), ("sglang", "0.10.1", "0.5.23"),
    ],
)  # fmt: skip
def test_a_release_without_a_schema_has_the_nearest(runtime: Runtime, release: str, nearest: str) -> None:
    schema = load_schema(runtime, release)
    assert (schema.version, schema.release) == (nearest, release)


@pytest.mark.parametrize("written", ["0.33.0", "v0.33.0", " 0.33.0", "0.33.0+cpu", None])
def test_a_release_by_its_other_spellings(written: str | None) -> None:
    assert load_schema("vllm", written) is load_schema("vllm")


def test_no_release_at_all() -> None:
    with pytest.raises(ConfigError, match=r"--version: expected a release such as 1\.4\.0rc1, found 'newest'"):
        load_schema("trtllm", "newest")


NAMES = st.sampled_from(
    [
        "speculative_config", "kv_cache_config", "cuda_graph_config", "moe_config", "max_batch_size", "max_num_tokens",
        "max_seq_len", "tensor_parallel_size", "moe_expert_parallel_size", "moe_tensor_parallel_size", "batch_sizes",
        "decoding_type", "speculative_model", "max_draft_len", "attention_backend", "enable_block_reuse", "dtype",
        "free_gpu_memory_fraction", "mode", "mask_token_id", "target_layer_ids", "context_recompute_tail",
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "method", "model", "num_speculative_tokens",
        "draft_tensor_parallel_size", "speculative_algorithm", "speculative_num_draft_tokens", "tp_size", "pp_size",
        "speculative_dflash_block_size", "speculative_draft_window_size", "context_length", "attn_dp_size", "zzz",
    ]
)  # fmt: skip
WORDS_IN_USE = st.sampled_from(
    ["DFlash", "Eagle3", "MTP", "dflash", "DFLASH", "VANILLA", "TRTLLM", "FA4", "source", "decode", "encode"]
)
VALUES = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=5) | WORDS_IN_USE
DOCUMENTS = st.dictionaries(
    NAMES,
    st.recursive(VALUES, lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=6), max_leaves=8),
    max_size=10,
)


@settings(max_examples=8)
@given(document=DOCUMENTS, schema=st.sampled_from(list(schemas().values())), gpus=st.sampled_from([None, "h200x8"]))
def test_no_document_breaks_a_check(document: dict[str, Any], schema: Schema, gpus: str | None) -> None:
    """A check of any file ends in findings, each on one line."""
    config = CheckedConfig(
        schema=schema, document=document,
        served=ServedModels(
            gpus=None if gpus is None else parse_gpus(gpus, "gpus"),
            draft_sizes=draft_sizes("z-lab/gpt-oss-120b-DFlash"), target_sizes=target_sizes("openai/gpt-oss-120b"),
            algorithms={"layers.0.self_attn.q_proj": "NVFP4"},
        ),
    )  # fmt: skip
    for finding in check(config):
        assert "\n" not in finding.fix
        assert finding.rule
