# SPDX-License-Identifier: Apache-2.0
"""`--runtime trtllm`: the arguments are those of serve-config, and the answers those of TensorRT-LLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from dflash_trt.cli.trtllm import generate_with_trtllm
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.schema import versions
from dflash_trt.deploy.trtllm_arguments import trtllm_arguments
from dflash_trt.errors import ConfigError, EngineError, MissingDependencyError, RequestError, VerificationError
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.trtllm.llm_backend import NO_EFFECT, generate, sampling_arguments
from tests.cli.commands import run, run_here
from tests.deploy.deployments import NAMES, resolved
from tests.paths import FIXTURES
from tests.trtllm.recording_llm import SAMPLING_FIELDS, Package

TARGET, DRAFT = FIXTURES / "tiny-qwen3", FIXTURES / "tiny-qwen3-dflash"
GREEDY = sampling_arguments(8)


def answers(kind: str, prompt: list[int]) -> list[int]:
    return [sum(prompt) % 50 + step for step in range(8)]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package(answers)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return made


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(f"description: a fixture\ntarget: {TARGET}\ndraft: {DRAFT}\ngpus: h100x1\npurpose: latency\n")
    return file


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 2, 3], "id": "first"}\n{"prompt": "def f"}\n')
    return file


@pytest.mark.parametrize("version", versions("trtllm"))
@pytest.mark.parametrize("name", [name for name in NAMES if resolved(name).mode == "native"])
def test_every_deployment_gives_arguments_that_the_release_knows(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package(answers, version)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    deployment = resolved(name)
    (answer,) = generate(deployment, "dflash", [[4, 5]], GREEDY)
    assert answer.token_ids == answers("DFlash", [4, 5])
    assert package.made == [{"model": deployment.target, **trtllm_arguments(deployment, "dflash")}]


def test_a_wrong_name_would_fail() -> None:
    package = Package(answers)
    arguments = trtllm_arguments(resolved("qwen3-8b.h200x1.latency"), "dflash")
    package.LLM(model="m", **arguments)
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        package.LLM(model="m", **{**arguments, "tensor_paralel_size": 1})
    with pytest.raises(TypeError, match="block_size"):
        package.LLM(
            model="m", **{**arguments, "speculative_config": arguments["speculative_config"] | {"block_size": 8}}
        )
    with pytest.raises(TypeError, match="max_new_tokens"):
        package.SamplingParams(max_new_tokens=3)


def test_counters(package: Package) -> None:
    deployment = resolved("qwen3-8b.h200x1.latency")
    (answer,) = generate(deployment, "dflash", [[1]], GREEDY)
    assert (answer.accepted, answer.proposed, answer.iterations, answer.tokens_per_iteration) == (6, 27, 4, 2.0)
    assert answer.tau(9) == 1 + 6 / 3  # three passes of nine drafts
    (plain,) = generate(deployment, "none", [[1]], GREEDY)
    assert (plain.accepted, plain.proposed, plain.tau(9)) == (None, None, None)


def test_sampling_options() -> None:
    defaults: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in NO_EFFECT}
    assert defaults == NO_EFFECT
    assert sampling_arguments(5, **NO_EFFECT) == {"max_tokens": 5, "return_perf_metrics": True}
    greedy = sampling_arguments(5, **NO_EFFECT | {"top_k": 7, "top_p": 0.5, "stop": ("a", "b")})
    assert greedy == {"max_tokens": 5, "return_perf_metrics": True, "stop": ["a", "b"]}
    drawn = {
        "temperature": 0.7, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 1, "ignore_eos": True,
    }  # fmt: skip
    arguments = sampling_arguments(5, **NO_EFFECT | drawn)
    assert arguments == {"max_tokens": 5, "return_perf_metrics": True, **drawn}
    assert arguments.keys() <= SAMPLING_FIELDS


def test_without_tensorrt_llm(config: Path, prompts: Path) -> None:
    arguments = ("verify", config, "--target", TARGET, "--prompts", prompts, "--runtime", "trtllm")
    result = run(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("error: --runtime trtllm: expected tensorrt_llm, found: No module named")
    assert "pip install tensorrt_llm==1.4.0rc1 dflash-trt" in result.stderr
    with pytest.raises(MissingDependencyError):
        generate(resolved("qwen3-8b.h200x1.latency"), "dflash", [[1]], GREEDY)


def test_more_ranks_than_gpus(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["dflash-trt", "generate", "a b.yaml"])
    deployment = resolved("gpt-oss-120b.b300x8.latency")
    with pytest.raises(ConfigError, match="expected 8 GPUs on this machine, found 4") as refused:
        generate(deployment, "dflash", [[1]], GREEDY)
    assert refused.value.hint is not None
    assert refused.value.hint.endswith("mpirun -n 8 trtllm-llmapi-launch dflash-trt generate 'a b.yaml'")
    assert package.made == []
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    assert len(generate(deployment, "dflash", [[1]], GREEDY)) == 1


def test_a_deployment_that_could_not_run(package: Package) -> None:
    import msgspec

    broken: ResolvedDeployment = msgspec.structs.replace(resolved("qwen3-8b.h200x1.latency"), draft_tokens=99)
    with pytest.raises(ConfigError, match="draft-length"):
        generate(broken, "dflash", [[1]], GREEDY)
    assert package.made == []


def test_engine_mode_needs_its_start(package: Package) -> None:
    deployment = resolved("gpt-oss-120b.b300x8.nvfp4")
    with pytest.raises(EngineError, match="registers the drafter in every rank"):
        generate(deployment, "dflash", [[1]], GREEDY)
    assert len(generate(deployment, "none", [[1]], GREEDY)) == 1


def test_verify(package: Package, config: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("verify", config, "--target", TARGET, "--prompts", prompts, "--runtime", "trtllm")
    run_here(*arguments, "--max-tokens", "8", "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["runtime"]) == (True, "trtllm")
    assert [prompt["name"] for prompt in document["prompts"]] == ["first", "line 2"]
    assert document["prompts"][0]["first_difference"] is None
    assert document["tau"] == document["prompts"][0]["tau"] > 1
    assert package.events == ["open DFlash", "close DFlash", "open none", "close none"]
    run_here(*arguments)
    assert [line for line in capsys.readouterr().out.splitlines() if "line 2" in line and "2.56" in line]


def test_verify_finds_another_token(
    config: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", Package(lambda kind, prompt: [len(kind), 2, 3]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(VerificationError, match="others in 2 of 2 prompts; the first is 'first'"):
        run_here("verify", config, "--target", TARGET, "--prompts", prompts, "--runtime", "trtllm", "--json")
    difference = json.loads(capsys.readouterr().out)["prompts"][0]["first_difference"]
    assert (difference["position"], difference["expected"], difference["found"]) == (0, 4, 6)


def test_what_the_file_says_is_no_option(config: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = ("verify", config, "--target", TARGET, "--prompts", prompts, "--runtime", "trtllm")
    with pytest.raises(click.UsageError, match="--reference is not for --runtime trtllm"):
        run_here(*arguments, "--reference", tmp_path)
    with pytest.raises(click.UsageError, match="takes a deployment for ENGINE"):
        run_here("verify", tmp_path, *arguments[2:])


def test_generate(package: Package, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_tokens": 6, "logprobs": False, **NO_EFFECT}

    def run_with(prompts: Any, *, baseline: bool, as_json: bool, **changes: Any) -> None:
        with click.Context(click.Command("generate")):
            generate_with_trtllm(
                config, str(TARGET), prompts, options | changes, chat=False, baseline=baseline, as_json=as_json
            )

    run_with([[1], [2, 3]], baseline=True, as_json=True)
    requests = json.loads(capsys.readouterr().out)["requests"]
    assert [request["token_ids"] for request in requests] == [answers("", [1])[:6], answers("", [2, 3])[:6]]
    assert all(request["identical"] for request in requests)
    assert requests[0]["baseline"]["accepted"] is None
    run_with("def f", baseline=False, as_json=False)
    output = capsys.readouterr()
    assert output.out == "<6 tokens>\n"
    assert "6 tokens in 4 iterations, tau " in output.err
    with pytest.raises(RequestError, match="expected greedy decoding"):
        run_with([[1]], baseline=True, as_json=False, temperature=1.0)
