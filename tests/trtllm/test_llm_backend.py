# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM as a backend: the arguments are those of serve-config, and the answers those of TensorRT-LLM."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from contextlib import aclosing, closing
from pathlib import Path

import click
import msgspec
import pytest
import torch

from dflash_trt.api import backend as backends
from dflash_trt.api.backend import Chunk
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import versions
from dflash_trt.deploy.trtllm_arguments import trtllm_arguments
from dflash_trt.errors import ConfigError, EngineError, MissingDependencyError, RequestError, VerificationError
from dflash_trt.llm import LLM
from dflash_trt.trtllm.llm_backend import TrtllmBackend, sampling_arguments
from tests.cli.commands import run, run_here
from tests.deploy.deployments import SERVED, resolved
from tests.fixtures_data import without_template
from tests.paths import FIXTURES, REPOSITORY
from tests.trtllm.scripted_package import SAMPLING_FIELDS, Package

TARGET, DRAFT = FIXTURES / "tiny-qwen3", FIXTURES / "tiny-qwen3-dflash"
GREEDY = SamplingParams(max_tokens=8)


def generate(
    deployment: ResolvedDeployment, method: Method, prompts: list[list[int]], params: SamplingParams
) -> list[Completion]:
    with closing(TrtllmBackend.open(deployment, method)) as backend:
        return backends.run(backend, prompts, params)


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
@pytest.mark.parametrize(
    "name", [name for name, runtime in SERVED if runtime == "trtllm" and resolved(name).mode == "native"]
)
def test_every_deployment_gives_arguments_it_knows(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(answers, version)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    deployment = resolved(name)
    (answer,) = generate(deployment, "dflash", [[4, 5]], GREEDY)
    assert answer.token_ids == answers("DFlash", [4, 5])
    assert package.made == [{"model": deployment.target, **trtllm_arguments(deployment, "dflash")}]


def test_counters(package: Package) -> None:
    deployment = resolved("qwen3-8b.h200x1.latency")
    (answer,) = generate(deployment, "dflash", [[1]], SamplingParams(max_tokens=8, temperature=1.0, seed=7))
    assert answer.seed == 7
    assert (answer.acceptance.accepted, answer.acceptance.proposed, answer.steps) == (6, 3 * 15, 3)
    assert answer.tau == 1 + 6 / 3
    assert answer.other_metrics == {"decoding_iter": 4, "avg_decoded_tokens_per_iter": 2.0}
    (plain,) = generate(deployment, "none", [[1]], GREEDY)
    assert (plain.acceptance.accepted, plain.acceptance.proposed, plain.tau) == (0, 0, None)


def test_a_stream_adds_up_to_the_answer(package: Package) -> None:
    backend = TrtllmBackend.open(resolved("qwen3-8b.h200x1.latency"), "dflash")

    async def read() -> list[Chunk]:
        return [chunk async for chunk in backend.stream((4, 5), GREEDY)]

    chunks = asyncio.run(read())
    assert [chunk.token_ids for chunk in chunks] == [[token] for token in answers("", [4, 5])]
    assert [chunk.completion is None for chunk in chunks] == [True] * 7 + [False]
    whole = chunks[-1].completion
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert backend.metrics() is None


def test_closing_a_stream_aborts_its_request(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TrtllmBackend.open(resolved("qwen3-8b.h200x1.latency"), "dflash")
    results = []
    submit = backend._llm.generate_async
    monkeypatch.setattr(backend._llm, "generate_async", lambda *a, **k: results.append(submit(*a, **k)) or results[-1])

    async def leave() -> None:
        async with aclosing(backend.stream([4, 5], GREEDY)) as chunks:
            await anext(chunks)

    asyncio.run(leave())
    assert [result.aborted for result in results] == [True]


def test_sampling_options() -> None:
    assert sampling_arguments(SamplingParams(max_tokens=5), is_speculative=True) == {
        "max_tokens": 5,
        "return_perf_metrics": True,
    }
    greedy = SamplingParams(max_tokens=5, top_k=7, top_p=0.5, min_p=0.1, stop=("a", "b"), stop_token_ids=3)
    greedy = sampling_arguments(greedy, is_speculative=True)  # min_p says nothing of a greedy token
    assert greedy == {"max_tokens": 5, "return_perf_metrics": True, "stop": ["a", "b"], "stop_token_ids": [3]}
    drawn = {
        "temperature": 0.7, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 1, "ignore_eos": True,
    }  # fmt: skip
    arguments = sampling_arguments(SamplingParams(max_tokens=5, **drawn), is_speculative=True)
    assert arguments == {"max_tokens": 5, "return_perf_metrics": True, **drawn}
    drawn["min_p"] = 0.1
    arguments = sampling_arguments(SamplingParams(max_tokens=5, logprobs=True, **drawn), is_speculative=False)
    assert arguments == {"max_tokens": 5, "return_perf_metrics": True, "logprobs": 0, **drawn}
    assert arguments.keys() <= SAMPLING_FIELDS


def test_what_the_one_model_sampler_would_refuse(package: Package) -> None:
    params = SamplingParams(max_tokens=5, logprobs=True, min_p=0.1, temperature=1.0)
    with pytest.raises(
        RequestError, match="logprobs and min_p: expected none beside speculative decoding in TensorRT-LLM"
    ):
        generate(resolved("qwen3-8b.h200x1.latency"), "dflash", [[1]], params)
    assert len(generate(resolved("qwen3-8b.h200x1.latency"), "none", [[1]], params)) == 1


def test_without_tensorrt_llm(config: Path, prompts: Path) -> None:
    """It is said before a target that is not here is asked for."""
    result = run("verify", config, "--target", "someone/a-target-that-is-not-here", "--prompts", prompts)
    assert result.returncode == 1
    assert result.stderr.startswith("error: a deployment file: expected tensorrt_llm, found: No module named")
    assert "pip install '.[trtllm]'" in result.stderr
    with pytest.raises(MissingDependencyError):
        generate(resolved("qwen3-8b.h200x1.latency"), "dflash", [[1]], GREEDY)


def test_more_ranks_than_gpus(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["dflash-trt", "generate", "a b.yaml"])
    deployment = resolved("gpt-oss-120b.b300x8.latency")
    with pytest.raises(ConfigError, match="expected 8 GPUs on this machine, found 4") as refused:
        generate(deployment, "dflash", [[1]], GREEDY)
    assert refused.value.hint.endswith("mpirun -n 8 trtllm-llmapi-launch dflash-trt generate 'a b.yaml'")
    assert package.made == []
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1")
    assert len(generate(deployment, "dflash", [[1]], GREEDY)) == 1


def test_a_deployment_that_could_not_run(package: Package) -> None:
    broken: ResolvedDeployment = msgspec.structs.replace(resolved("qwen3-8b.h200x1.latency"), num_draft_tokens=99)
    with pytest.raises(ConfigError, match="draft-length"):
        generate(broken, "dflash", [[1]], GREEDY)
    assert package.made == []
    deployment = resolved("gpt-oss-120b.b300x8.nvfp4")
    with pytest.raises(EngineError, match="registers the drafter in every rank"):
        generate(deployment, "dflash", [[1]], GREEDY)
    assert len(generate(deployment, "none", [[1]], GREEDY)) == 1


def test_verify(package: Package, config: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("verify", config, "--target", TARGET, "--prompts", prompts)
    run_here(*arguments, "--max-tokens", "8", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert [prompt["name"] for prompt in document["prompts"]] == ["first", "line 2"]
    assert document["prompts"][0]["first_difference"] is None
    assert document["tau"] == document["prompts"][0]["tau"] > 1
    assert package.events == ["open DFlash", "close DFlash", "open none", "close none"]


def test_verify_finds_another_token(
    config: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", Package(lambda kind, prompt: [len(kind), 2, 3]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(VerificationError, match="others in 2 of 2 prompts; the first is 'first'"):
        run_here("verify", config, "--target", TARGET, "--prompts", prompts, "--json")
    difference = json.loads(capsys.readouterr().out)["prompts"][0]["first_difference"]
    assert (difference["position"], difference["expected"], difference["found"]) == (0, 4, 6)


def test_what_the_file_says_is_no_option(config: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = ("verify", config, "--target", TARGET, "--prompts", prompts)
    with pytest.raises(click.UsageError, match="--reference is for engine directories, found the deployment"):
        run_here(*arguments, "--reference", tmp_path)
    with pytest.raises(click.UsageError, match="--max-batch-size is for an engine directory: the deployment file"):
        run_here("generate", config, "def f", "--target", TARGET, "--batch-size", 2, "--json")


def test_generate(package: Package, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text("[[1], [2, 3]]")
    command = ("generate", config, "--target", TARGET, "--max-tokens", 6)
    run_here(*command, "--token-ids", tmp_path / "ids.json", "--baseline", "--json")
    requests = json.loads(capsys.readouterr().out)["requests"]
    assert [request["token_ids"] for request in requests] == [answers("", [1])[:6], answers("", [2, 3])[:6]]
    assert all(request["identical"] for request in requests)
    assert package.events == ["open DFlash", "close DFlash", "open none", "close none"]
    run_here(*command, "def f")
    output = capsys.readouterr()
    assert output.out.startswith("def f<")
    assert "6 tokens in 3 steps, tau 3.00" in output.err
    with pytest.raises(RequestError, match="expected greedy decoding"):
        run_here(*command, "def f", "--baseline", "--temperature", 1)


def test_what_is_wrong_is_said_before_a_model_is_loaded(package: Package, config: Path, tmp_path: Path) -> None:
    command = ("generate", config, "--target", without_template(TARGET.name, tmp_path))
    for wrong in (("def f", "--chat"), ("",), ("def f", "--temperature", -1)):
        with pytest.raises(RequestError):
            run_here(*command, *wrong)
    assert package.made == []


def test_a_deployment_opens_as_an_engine_does(package: Package, config: Path) -> None:
    """`LLM` takes its file or name; prompts, parameters and answers are those of an engine directory."""
    with LLM(config, TARGET) as llm:
        first, second = llm.generate([[4, 5], {"prompt": "a"}], GREEDY, use_tqdm=False)
        assert (first.token_ids, second.token_ids) == (answers("", [4, 5]), answers("", [97]))
        assert (first.prompt, first.tau) == ([4, 5], 3.0)
        assert len(llm.chat([{"role": "user", "content": "a"}], GREEDY)[0].token_ids) == 8
        chunks = list(llm.stream([4, 5], GREEDY))
        assert [chunk.token_ids for chunk in chunks] == [[token] for token in answers("", [4, 5])]
        assert chunks[-1].completion.token_ids == first.token_ids
        assert llm.metrics() is None
        assert llm.get_tokenizer().decode([5])
    assert package.made[0]["model"] == str(TARGET)
    assert package.events == ["open DFlash", "close DFlash"]
    with LLM("qwen3-8b.h200x1.latency", draft_length=0) as llm:
        assert llm.generate([1], GREEDY)[0].tau is None
    assert package.events[2:] == ["open none", "close none"]
    with pytest.raises(RequestError, match=r"cache_gib is for an engine directory; the deployment file .* sets it"):
        LLM(config, TARGET, cache_gib=2)
    with pytest.raises(RequestError, match="draft_length is for an engine directory"):
        LLM(config, TARGET, draft_length=3)


def test_a_stream_that_is_left_aborts_its_request(
    package: Package, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(config, TARGET) as llm:
        results, submit = [], llm.backend.submit
        monkeypatch.setattr(llm.backend, "submit", lambda *a, **k: results.append(submit(*a, **k)) or results[-1])
        stream = llm.stream([4, 5], GREEDY)
        next(stream)
        stream.close()
    assert [result.aborted for result in results] == [True]


def test_engine_mode_says_how_a_program_starts(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["my app.py", "--prompts", "a.jsonl"])
    with pytest.raises(EngineError, match="registers the drafter in every rank") as refused:
        LLM("gpt-oss-120b.b300x8.nvfp4")
    assert refused.value.hint == "python -m dflash_trt.trtllm 'my app.py' --prompts a.jsonl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, words in (("nvfp4", "python -m dflash_trt.trtllm"), ("latency", "python")):
        with pytest.raises(ConfigError) as refused:
            LLM(f"gpt-oss-120b.b300x8.{name}")
        assert f"mpirun -n 8 trtllm-llmapi-launch {words} 'my app.py' --prompts" in str(refused.value.hint)
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(ConfigError) as refused:
        LLM("gpt-oss-120b.b300x8.latency")
    assert str(refused.value.hint).endswith("trtllm-llmapi-launch python FILE.py")


def test_chat(
    package: Package, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"sort")))
    run_here("chat", config, "--target", TARGET, "--max-tokens", 3)
    output = capsys.readouterr()
    assert output.out.count("<") == 3
    assert "3 tokens, tau 3.00" in output.err
    assert package.events == ["open DFlash", "close DFlash"]
    with pytest.raises(click.UsageError, match="--cache-gib is for an engine directory: the deployment file"):
        run_here("chat", config, "--target", TARGET, "--cache-gib", 1)


def test_the_page_runs(package: Package, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program of docs/trtllm_python.md, with a deployment of the fixtures."""
    page = (REPOSITORY / "docs" / "trtllm_python.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert '"gpt-oss-120b.b300x8.latency"' in code
    code = code.replace('"gpt-oss-120b.b300x8.latency"', repr(str(config)))
    exec(compile(code, "docs/trtllm_python.md", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("<") for line in lines] == [8, 8, 8]
    assert lines[0].endswith(" length 3.0")
    assert package.events == ["open DFlash", "close DFlash"]
