# SPDX-License-Identifier: Apache-2.0
"""Servers in Kubernetes manifests and Compose files, and files that are neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, WARNING
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import ConfigError
from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS

VLLM = "vllm/vllm-openai:v0.33.0"


def pod(**container: object) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "c", **container}]}}


def compose(**service: object) -> dict[str, Any]:
    return {"services": {"llm": service}}


def documents(tmp_path: Path, *manifests: object, runtime: str = "vllm") -> list[dict[str, Any]]:
    file = tmp_path / "manifest.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    return [config.document for config in file_configs(file, load_schema(runtime))]


WORDS = ["--model", "m", "--port", "1"]
DYNAMO = {"command": ["python3", "-m", "dynamo.vllm"], "args": [*WORDS, "--endpoint", "e"]}
EXEC = {"exec": {"command": ["x"]}}
PORT = [{"name": "PORT", "value": "1"}]


def nested(kind: str, *path: str, **container: object) -> dict[str, Any]:
    """A resource whose container lies at a path of its own."""
    value: Any = {"image": "i", **container}
    for key in reversed(path):
        value = {key: value}
    return {"apiVersion": "v1", "kind": kind, "spec": value}


@pytest.mark.parametrize(
    "manifest",
    [
        pod(image=VLLM, args=["m", "--port", "1"]),
        pod(image=VLLM, args=["--model=m", "--port=1"]),
        pod(image="own", command=["vllm", "serve", "m"], args=["--port", "$(PORT)"], env=PORT),
        pod(image="own", command=["sh", "-c"], args=["set -e\nexec vllm serve m --port 1\n"]),
        pod(image="own", **DYNAMO),
        pod(image="own", command=["/bin/bash", "-c", "ray start; vllm serve m --port 1"], livenessProbe=EXEC),
        {"apiVersion": "v1", "kind": "List", "items": [pod(image=VLLM, args=["m", "--port", "1"])]},
        nested("DynamoGraphDeployment", "services", "w", "extraPodSpec", "mainContainer", **DYNAMO),
        nested("LeaderWorkerSet", "leaderWorkerTemplate", "leaderTemplate", command=["vllm", "serve", *WORDS]),
        compose(image=VLLM, command="--model m --port 1"),
        compose(image=VLLM, command=["m", "--port", "${PORT}"], environment=["PORT=1"]),
        compose(image=VLLM, command=["m", "--port", "${PORT:-1}"]),
        compose(image="own", entrypoint="python3 -m vllm.entrypoints.openai.api_server", command="--model m --port 1"),
        compose(image="own", command=["bash", "-c", "PORT=1; vllm serve m --port $$PORT"]),
    ],
)
def test_containers(manifest: dict[str, Any], tmp_path: Path) -> None:
    (document,) = documents(tmp_path, {"apiVersion": "v1", "kind": "Service"}, manifest)
    assert document.pop("model_tag", None) or document.pop("model") == "m"
    assert document == {"port": 1}


def test_files_of_a_config_map(tmp_path: Path) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"serve.yaml": "max_batch_size: 7\n"}}
    container = pod(image="i", command=["trtllm-serve", "m", "--config", "/config/serve.yaml"])
    assert documents(tmp_path, config_map, container, runtime="trtllm") == [{"max_batch_size": 7}]


def test_dynamo_and_its_own_flags(tmp_path: Path) -> None:
    words = [
        "--model-path",
        "m",
        "--expert-parallel-size=2",
        "--trtllm.kv_cache_config.dtype",
        "fp8",
        "--publish-metrics",
    ]
    command = ["python3", "-m", "dynamo.trtllm", "--model-path", "m", *words, "--extra-engine-args", "c.yaml"]
    (tmp_path / "c.yaml").write_text("kv_cache_config: {dtype: auto, enable_block_reuse: false}\n")
    assert documents(tmp_path, pod(image="i", command=command), runtime="trtllm") == [
        {"moe_expert_parallel_size": 2, "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False}}
    ]
    (tmp_path / "run.sh").write_text("python -m dynamo.sglang --model-path m --tp 2 --endpoint a.b.c --disagg-config x")
    (config,) = file_configs(tmp_path / "run.sh", load_schema("sglang"))
    assert config.document == {"model_path": "m", "tp_size": 2}
    assert "endpoint, disagg_config" in config.reading[0].problem


@pytest.mark.parametrize(
    ("before", "after", "lacking"),
    [
        ("", "", {"dyn_reasoning_parser", "dyn_tool_call_parser", "dyn_default_thinking_mode"}),
        ("", "--tool-call-parser qwen --dyn-reasoning-parser=qwen3 --dyn-default-thinking-mode disabled",
         {"dyn_tool_call_parser"}),
        ("DYN_TOOL_CALL_PARSER=hermes", "--dyn-reasoning-parser kimi_k25 --dyn-default-thinking-mode disabled",
         {"dyn_reasoning_parser"}),
        ("DYN_DEFAULT_THINKING_MODE=disabled", "--dyn-reasoning-parser qwen3 --dyn-tool-call-parser hermes", set()),
        ("DYN_TOOL_CALL_PARSER=hermes DYN_REASONING_PARSER=qwen3 DYN_DEFAULT_THINKING_MODE=disabled",
         "--tool-call-parser qwen", {"tool_call_parser"}),
    ],
)  # fmt: skip
def test_dynamo_parses_answers_itself(before: str, after: str, lacking: set[str], tmp_path: Path) -> None:
    draft = "--speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"
    command = f"{before} python -m dynamo.sglang --model-path Qwen/Qwen3-8B --reasoning-parser qwen3 {draft} {after}"
    (tmp_path / "run.sh").write_text(command)
    (config,) = file_configs(tmp_path / "run.sh", load_schema("sglang"))
    found = [each for each in check(config) if each.rule in ("parsers", "chat-mode", "dynamo")]
    assert {each.key for each in found} == lacking
    for each in found:  # the worker does not start with two parsers of tool calls
        is_second = each.key == "tool_call_parser"
        assert each.severity == (ERROR if is_second else WARNING)
        assert each.fix.startswith("remove it" if is_second else f"write --{each.key.replace('_', '-')} ")


def test_a_graph_of_engine_mode_is_read(tmp_path: Path) -> None:
    command = ["python", "-m", "dflash_trt.trtllm", "dynamo.trtllm", "--model-path", "m", "--max-batch-size", "8"]
    assert documents(tmp_path, pod(image="i", command=command), runtime="trtllm") == [{"max_batch_size": 8}]


def test_commands_without_a_server_of_their_own(tmp_path: Path) -> None:
    for command, said in (
        (["trtllm-serve", "disaggregated", "-c", "x.yaml"], "found `trtllm-serve disaggregated`"),
        (["trtllm-serve"], "neither a model nor an argument"),
    ):
        with pytest.raises(ConfigError, match=said):
            documents(tmp_path, pod(image="i", command=command), runtime="trtllm")


def test_servers_of_another_runtime_are_listed(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("vllm serve a &\nsglang serve --model b\n")
    (config,) = file_configs(tmp_path / "run.sh", load_schema("vllm"))
    assert [finding.problem for finding in config.reading] == ["a server of sglang in run.sh"]


def test_what_a_container_takes_from_elsewhere_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump(compose(image=VLLM, command="m", env_file="x.env")))
    (config,) = file_configs(file, load_schema("vllm"))
    assert config.reading[0].problem == "variables of x.env"


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("apiVersion: v1\nkind: Pod\nspec: {containers: [{image: nginx}]}\n", r"found containers of nginx, .* \(Pod\)"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {a: b}\n", r"found no container \(ConfigMap\)"),
        ("services: {web: {image: nginx}}\n", r"containers of nginx, .* \(Compose file\)"),
        ("context_servers: {num_instances: 1}\nport: 1\n", "a file of `trtllm-serve disaggregated`"),
        ("replicaCount: 2\nimage: {tag: x}\n", "values of a Helm chart"),
        ("servingEngineSpec: {modelSpec: []}\n", "vLLM's production stack"),
        ("extra_llm_api_options: {max_batch_size: 8}\n", "arguments below extra_llm_api_options"),
        ("a: 1\nb: {max_batch_size: 8, max_num_seqs: 8}\n", "no key is an argument of .*: a, b"),
        ("{}\n", "no key is an argument of .*: no key"),
        ("null\n", "expected a mapping"),
        ("{broken\n", "expected YAML"),
        ("apiVersion: v1\nkind: [\n", "expected YAML"),
    ],
)  # fmt: skip
def test_a_file_without_an_argument_never_passes(text: str, said: str, runtime: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        file_configs(tmp_path / "file.yaml", load_schema(runtime))


@pytest.mark.parametrize("launcher", ["kubernetes", "slurm"])
@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
def test_generated_manifests_are_read(launcher: str, runtime: str, tmp_path: Path) -> None:
    """A check finds nothing wrong in the manifests that serve-config writes for a cluster."""
    name, file = "gpt-oss-120b.b300x8.latency", tmp_path / "out"
    assert (BUILD_CONFIGS / f"{name}.yaml").is_file()
    write = ["serve-config", name, "--runtime", runtime, "--launcher", launcher, "-o", str(file)]
    assert run(*write).returncode == 0
    checked = run("serve-config", name, "--runtime", runtime, "--check", str(file), "--strict")
    assert checked.returncode == 0, checked.stdout
