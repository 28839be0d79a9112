# SPDX-License-Identifier: Apache-2.0
"""The repository for TensorRT-LLM in a real server, alone and under mpirun; TensorRT-LLM is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests.cli.commands import run_here
from tests.deploy.deployments import BUILD_CONFIGS, rendered
from tests.paths import REPOSITORY
from tests.triton.conftest import TARGET
from tests.triton.server import GrpcClient, RefusedError, Server, environment
from tests.waiting import PATIENCE


def test_rank_0_answers_and_the_others_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None or find_spec("mpi4py") is None:
        pytest.skip("no mpirun and mpi4py: pip install mpi4py mpich")
    run_here("triton-repo", BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml", "-o", tmp_path / "models")
    notes = tmp_path / "notes"
    monkeypatch.setenv("STAND_IN_NOTES", str(notes))
    launcher = (mpirun, "-n", "3")
    server = Server(environment(), tmp_path / "models", tmp_path / "log", sites=(STAND_IN,), launcher=launcher)
    try:
        server.await_ready()
        made = json.loads(notes.read_text().splitlines()[0])
        assert sorted(made["workers"]) == [[1, "triton_python_b"], [2, "triton_python_b"]]
        assert server.generate({"text_input": WORDS})["text_output"] == f" {WORDS}"
        os.kill(made["server"], signal.SIGTERM)
        server.process.wait(PATIENCE)
        assert json.loads(notes.read_text().splitlines()[-1]) == {"shutdown": True}
        log = server.log.read_text(errors="replace")
        assert all(f"rank {rank}: rank 0 has ended" in log for rank in (1, 2))
        assert log.count("Started HTTPService") == 1
    finally:
        server.stop()


pytestmark = pytest.mark.full
DEPLOYMENT = "gpt-oss-120b.b300x8.latency"
STAND_IN = REPOSITORY / "tests" / "triton" / "stand_in"
WORDS = "one two three four five"


@pytest.fixture(scope="module")
def directory(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three repositories: TensorRT-LLM's twice, one that streams deltas, and one whose model knows only infer."""
    directory = tmp_path_factory.mktemp("trtllm")
    run_here("triton-repo", BUILD_CONFIGS / f"{DEPLOYMENT}.yaml", "-o", directory / "trtllm")
    run_here("triton-repo", BUILD_CONFIGS / f"{DEPLOYMENT}.yaml", "--name", "deltas", "-o", directory / "deltas")
    change(directory / "deltas/deltas/1/model.yaml", "stream_deltas: false", "stream_deltas: true")
    options = ("--runtime", "embedded", "--unary", "--name", "unary")
    run_here("triton-repo", engine, "--target", TARGET, *options, "-o", directory / "unary")
    return directory


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def explicit_server(directory: Path, log: str, *options: str, sites: tuple[Path, ...] = ()) -> Server:
    others = (f"--model-repository={directory / name}" for name in ("deltas", "unary"))
    options = (*others, "--model-control-mode=explicit", *options)
    return Server(environment(), directory / "trtllm", directory / log, *options, sites=sites)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Server]:
    """The stand-in used by our model, and the other model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAND_IN_NOTES", str(directory / "notes"))
        server = explicit_server(directory, "log", "--load-model=*", sites=(STAND_IN,))
    try:
        server.await_ready()
        yield server
    finally:
        server.stop()
    assert notes(directory)[-1] == {"shutdown": True}


def notes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "notes").read_text().splitlines()]


def test_the_repository_index_knows_it(directory: Path) -> None:
    server = explicit_server(directory, "index.log")
    file = directory / "trtllm/tensorrt_llm/1/model.yaml"
    try:
        server.await_ready()
        index = json.loads("".join(server.post("/v2/repository/index", {})))
        assert [model["name"] for model in index] == ["deltas", "tensorrt_llm", "unary"]
        # The configuration is accepted and our model runs: what is missing is the package.
        with pytest.raises(RefusedError, match=r"No module named .+tensorrt_llm"):
            list(server.post("/v2/repository/models/tensorrt_llm/load", {}))
        change(file, "decoupled: true", "decoupled: false")
        with pytest.raises(RefusedError, match=r"triton_config\.decoupled: expected True, as config\.pbtxt says"):
            list(server.post("/v2/repository/models/tensorrt_llm/load", {}))
    finally:
        change(file, "decoupled: false", "decoupled: true")
        server.stop()


def test_the_server_understood_the_configuration(served: Server) -> None:
    config = json.loads(served.get("/v2/models/tensorrt_llm/config"))
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert len(config["input"]) == 19
    assert len(config["output"]) == 18


def test_the_llm_gets_what_trtllm_serve_gets(served: Server, directory: Path) -> None:
    arguments = next(entry["arguments"] for entry in notes(directory) if "arguments" in entry)
    assert arguments.pop("model") == "openai/gpt-oss-120b"
    assert arguments == rendered(DEPLOYMENT, "trtllm").arguments
    document = yaml.safe_load((directory / "trtllm/tensorrt_llm/1/model.yaml").read_text())
    assert document["speculative_config"] == arguments["speculative_config"]


def test_an_answer_with_its_figures(served: Server, directory: Path) -> None:
    body = {"text_input": WORDS, "sampling_param_return_perf_metrics": True}
    answer = served.generate({**body, "sampling_param_stop": ["x"], "return_stop_reason": True})
    assert answer["text_output"] == f" {WORDS}"
    assert (answer["acceptance_rate"], answer["total_accepted_draft_tokens"], answer["total_draft_tokens"]) == (
        0.75, 30, 40,
    )  # fmt: skip
    assert (answer["kv_cache_hit_rate"], answer["kv_cache_reused_block"]) == (0.25, 3)
    assert (answer["arrival_time_ns"], answer["last_token_time_ns"]) == (10**9, 4 * 10**9)
    assert (answer["stop_reason"], answer["num_output_tokens"]) == ("None", 5)
    assert notes(directory)[-1]["params"] == {"max_tokens": 32, "stop": ["x"], "return_perf_metrics": True}


def test_a_stream_brings_all_text_so_far(served: Server) -> None:
    texts = [event["text_output"] for event in served.stream({"text_input": WORDS})]
    assert texts == [" one", " one two", " one two three", " one two three four", f" {WORDS}"]
    events = list(served.stream({"text_input": WORDS}, model="deltas"))
    assert [event["text_output"] for event in events] == [f" {word}" for word in WORDS.split()]
    assert served.generate({"text_input": WORDS}, model="deltas")["text_output"] == f" {WORDS}"


def test_a_client_that_leaves_aborts_its_request(served: Server, directory: Path) -> None:
    client = GrpcClient(served)
    next(client.stream({"text_input": "word " * 20000, "streaming": True, "sampling_param_max_tokens": 20000}))
    client.leave()
    served.generate({"text_input": WORDS})  # the loop is not blocked
    for _ in range(600):
        if any("aborted" in entry for entry in notes(directory)):
            return
        served.generate({"text_input": WORDS})
    pytest.fail("not aborted")


def test_one_response_a_request(served: Server, llm: LLM) -> None:
    """`infer`, which a decoupled model has not."""
    prompt = "import os\n"
    expected = llm.generate(prompt, SamplingParams(max_tokens=32))[0].text
    data = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]}
    answer = json.loads("".join(served.post("/v2/models/unary/infer", {"inputs": [data]})))
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs == {"text_output": [expected]}
    with pytest.raises(RefusedError, match="streaming: expected false"):
        list(served.stream({"text_input": prompt}, model="unary"))
