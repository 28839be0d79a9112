# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver answers what `dflash-trt generate` answers, and does what docs/serve.md and docs/examples say.

Without a server: the watchdog and rank of the model process, what is read of requests, and what answers become.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import ConfigError, EngineError, RequestError
from dflash_trt.llm import LLM
from dflash_trt.triton import mpi_ranks
from dflash_trt.triton.repository import server_command
from dflash_trt.triton.request_tensors import check_numpy, check_parameters, is_stop, read_inputs
from dflash_trt.triton.response_tensors import response_tensors
from dflash_trt.triton.tensors import INPUTS, OUTPUTS
from dflash_trt.trtllm.launch_environment import read_mpi_launch
from dflash_trt.trtllm.registration import check_start
from tests.cli.commands import run_here
from tests.paths import REPOSITORY
from tests.triton.conftest import TARGET
from tests.triton.server import LOOPBACK, GrpcClient, RefusedError, Server
from tests.waiting import PATIENCE

TEXT_INPUT = np.array([b"Gr\xc3\xbc\xc3\x9fe"], dtype=np.object_)


def test_what_is_given_is_read_and_no_more() -> None:
    inputs = read_inputs(
        {
            "text_input": TEXT_INPUT, "streaming": np.array([True]),
            "sampling_param_seed": np.array([2**64 - 1], dtype=np.uint64),
            "sampling_param_stop": np.array([b"a", b"b"], dtype=np.object_),
            "sampling_param_return_perf_metrics": np.array([True]), "return_finish_reason": np.array([True]),
            "return_stop_reason": np.array([False]),
        }
    )  # fmt: skip
    assert (inputs.prompt, inputs.streaming) == ("Grüße", True)
    assert inputs.params == SamplingParams(max_tokens=32, seed=2**64 - 1, stop=("a", "b"))
    assert inputs.returns == {"finish_reason", "perf_metrics"}
    inputs = read_inputs({"text_input": TEXT_INPUT})
    assert (inputs.streaming, inputs.echo, inputs.returns) == (False, False, frozenset())
    assert inputs.params == SamplingParams(max_tokens=32, temperature=0.0, logprobs=False)
    with pytest.raises(RequestError, match=r"sampling_param_best_of: only 1 is supported, not 2"):
        read_inputs({"text_input": TEXT_INPUT, "sampling_param_best_of": np.array([2])})
    with pytest.raises(RequestError, match="sampling_param_top_k: expected one value, found 2"):
        read_inputs({"text_input": TEXT_INPUT, "sampling_param_top_k": np.array([1, 2], dtype=np.int32)})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("max_tokens", "'max_tokens' is not an input of this model; did you mean sampling_param_max_tokens?"),
        ("sampling_param_temperatur", "'sampling_param_temperatur' is not .*; did you mean sampling_param_temperature"),
        ("stream", "'stream' is not an input of this model; did you mean streaming?"),
        ("seed", "'seed' is not an input of this model; did you mean sampling_param_seed?"),
        ("xyz", "'xyz' is not an input of this model$"),
    ],
)
def test_a_field_that_is_no_input_is_refused(name: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        check_parameters({"id": "a", name: 1})
    check_parameters({"id": "a"})


def test_triton_passes_unknown_fields_on(server: Server) -> None:
    body = {"text_input": "def f(", "id": "a"}
    for name, value in (("max_tokens", 3), ("sampling_param_temperatur", "0"), ("parameters", {"top_k": 2})):
        with pytest.raises(RefusedError, match="is not an input of this model; did you mean sampling_param_"):
            server.generate({**body, name: value})
    assert server.generate(body)["text_output"]


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.5)])
def test_who_says_how_to_draw_wants_it_drawn(name: str, value: float) -> None:
    inputs = read_inputs({"text_input": TEXT_INPUT, f"sampling_param_{name}": np.array([value])})
    assert inputs.params.temperature == 1.0
    assert getattr(inputs.params, name) == value


@pytest.mark.parametrize(
    ("streaming", "excluded", "echo"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_prompt_comes_back_in_a_whole_answer(streaming: bool, excluded: bool, echo: bool) -> None:
    tensors = {"streaming": np.array([streaming]), "sampling_param_exclude_input_from_output": np.array([excluded])}
    assert read_inputs({"text_input": TEXT_INPUT, **tensors}).echo is echo


@pytest.mark.parametrize(("value", "expected"), [([True], True), ([False], False), (None, False)])
def test_stop_requests(value: list[bool] | None, expected: bool) -> None:
    assert is_stop({} if value is None else {"stop": np.array(value)}) is expected


def test_tensors_of_an_answer() -> None:
    completion = Completion(
        token_ids=[1, 2, 3], text="ab", finish_reason="stop", stop_reason=None, logprobs=None, cumulative_logprob=None,
        seed=None, arrived=1024.0,
        acceptance=Acceptance(passes=1, drafting_passes=1, emitted=2, proposed=4, accepted=2),
        queue_seconds=0.25, ttft_seconds=0.5, itl_seconds=None, seconds=1.0, other_metrics={"num_reused_blocks": 3},
    )  # fmt: skip
    assert response_tensors("b", None, frozenset({"finish_reason"})) == {"text_output": [b"b"]}
    wanted = frozenset({"finish_reason", "stop_reason", "cumulative_logprob", "perf_metrics"})
    tensors = response_tensors("ab", completion, wanted)
    assert {name: (tensor.dtype.name, tensor.tolist()) for name, tensor in tensors.items()} == {
        "text_output": ("object", [b"ab"]),
        "finish_reason": ("object", [b"stop"]),
        "stop_reason": ("object", [b"None"]),
        "arrival_time_ns": ("int64", [1024 * 10**9]),
        "first_scheduled_time_ns": ("int64", [1024_250_000_000]),
        "first_token_time_ns": ("int64", [1024_500_000_000]),
        "last_token_time_ns": ("int64", [1025 * 10**9]),
        "acceptance_rate": ("float32", [0.5]),
        "total_accepted_draft_tokens": ("int32", [2]),
        "total_draft_tokens": ("int32", [4]),
        "acceptance_length": ("float32", [2.0]),
        "kv_cache_reused_block": ("int32", [3]),
        "num_output_tokens": ("int32", [3]),
    }
    assert response_tensors("ab", completion, frozenset()).keys() == {"text_output"}


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"}


def set_environment(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "ORTE_")):
            patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, (0, 1)), (OPEN_MPI, (3, 8)), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2))],
)
def test_the_world(variables: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, variables)
    launch = read_mpi_launch(os.environ)
    assert (launch.rank, launch.size) == expected


def test_a_lone_process_forgets_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes must not join the job of an `mpirun -n 1`; a user's settings stay."""
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMI_FD": "7", "ORTE_X": "1"}
    set_environment(monkeypatch, {**alone, "OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash"})
    assert mpi_ranks.leader_session() == {}
    left = {name for name in os.environ if name.startswith(("OMPI_", "PMI", "ORTE_"))}
    assert left == {"OMPI_MCA_btl", "PMIX_MCA_gds"}


def test_numpy_2_is_refused_beside_the_bundle_that_crashes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_numpy()
    metadata = tmp_path / "nvidia_pytriton-0.7.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"nvidia-pytriton 0\.7\.0 takes arrays of NumPy 1, not of 2"):
        check_numpy()


def test_spawned_ranks_import_the_drafters_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that registers is the main module for mpi4py, as the engine's own check requires."""
    registered: list[bool] = []
    monkeypatch.setattr(mpi_ranks, "register", lambda: registered.append(True))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(EngineError, match="expected a start that registers the drafter"):
        check_start()
    mpi_ranks.use_engine_drafter()
    check_start()
    assert registered == [True]


SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(3600)"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"


def start(command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout.readline()  # it runs
    return process


@pytest.mark.parametrize(
    ("server_command", "expected"),
    [
        (SLEEP, -signal.SIGTERM),
        pytest.param([sys.executable, "-c", STUBBORN], -signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_a_dead_model_ends_its_server(server_command: list[str], expected: int) -> None:
    model, server = start(SLEEP), start(server_command)
    watchdog = watchdog_of(model, server)
    model.kill()
    assert server.wait(PATIENCE) == expected
    assert watchdog.wait(PATIENCE) == 0
    assert f"model process {model.pid} has died; terminating server {server.pid}" in watchdog.stderr.read().decode()


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)])
def test_an_orderly_end_of_both_is_none_of_its_business(first: int) -> None:
    processes = [start(SLEEP), start(SLEEP)]
    watchdog = watchdog_of(*processes)
    watchdog.send_signal(signal.SIGSTOP)  # sees both ends at once
    for process in (processes[first], processes[1 - first]):
        process.kill()
    watchdog.send_signal(signal.SIGCONT)
    assert watchdog.wait(PATIENCE) == 0
    assert watchdog.stderr.read() == b""


def watchdog_of(model: subprocess.Popen[bytes], server: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dflash_trt.triton.watchdog", str(model.pid), str(server.pid)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


TEXT = (REPOSITORY / "docs" / "serve.md").read_text().partition("## Triton Inference Server\n")[2]


def with_ports(text: str, server: Server) -> str:
    """Examples with this server's ports."""
    ports = {"8000": server.http, "8001": server.grpc, "8002": server.prometheus}
    return re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda match: str(ports[match[0]]), text)


def test_the_python_client(server: Server, llm: LLM) -> None:
    script = with_ports((REPOSITORY / "docs" / "examples" / "triton_stream.py").read_text(), server)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    expected = llm.generate("def quicksort(", SamplingParams(max_tokens=64))[0]
    text, _, length = result.stdout.rpartition("\nacceptance length ")
    assert text.endswith(expected.text)
    assert float(length) == pytest.approx(expected.tau)
    assert result.stdout.count("\n") > 4


def test_the_command_lines(server: Server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    blocks = re.findall(r"^```sh\n(.*?)^```", with_ports(TEXT, server), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("curl")]
    assert len(lines) == 3
    for line in lines:
        command = ["sh", "-c", line]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert result.returncode == 0, line
        assert "ready" in line or "dflash_output_tokens" in result.stdout or "data: {" in result.stdout, line
    command = " ".join(server_command("models", LOOPBACK))  # type: ignore[arg-type]
    assert f"\n{command}\n" in TEXT
    assert "with `mpirun -n 8` before the command" in TEXT


def test_the_page_names_every_tensor() -> None:
    for spec in (*INPUTS, *OUTPUTS):
        short = spec.name.removeprefix("sampling_param")
        assert spec.name in TEXT or f"`{short}`" in TEXT or spec.name.startswith("kv_cache_"), spec.name


PROMPT = "def parse_args(argv):"
TOKENS = 40
BODY = {
    "text_input": PROMPT, "sampling_param_max_tokens": TOKENS, "sampling_param_return_perf_metrics": True,
    "return_finish_reason": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(engine: Path) -> dict[str, Any]:
    """Output of the command line."""
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())) as printed:
        run_here(
            "generate", engine, PROMPT, "--target", TARGET, "--max-tokens", TOKENS, "--draft-length", "7", "--json"
        )
        printed.seek(0)
    answer: dict[str, Any] = json.load(printed)["requests"][0]
    assert answer["accepted"] > 0
    return answer


def check_figures(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Token counts and acceptance figures are the command line's, and agree with each other."""
    assert answer["num_output_tokens"] == len(expected["token_ids"])
    assert answer["total_draft_tokens"] == expected["proposed"]
    assert answer["total_accepted_draft_tokens"] == expected["accepted"]
    assert answer["acceptance_rate"] == pytest.approx(expected["accepted"] / expected["proposed"])
    assert answer["acceptance_length"] == pytest.approx(expected["tau"])
    assert answer["finish_reason"] == expected["finish_reason"] == "length"
    times = [answer[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)


def test_one_answer(server: Server, expected: dict[str, Any]) -> None:
    answer = server.generate(BODY)
    assert answer["text_output"] == expected["text"]
    check_figures(answer, expected)


def test_figures_come_when_asked_for_and_refusals_with_a_reason(server: Server) -> None:
    answer = server.generate({"text_input": PROMPT})
    assert answer.keys() == {"model_name", "model_version", "text_output"}
    with pytest.raises(RefusedError, match="max_tokens: expected at least 1, found -1"):
        server.generate({**BODY, "sampling_param_max_tokens": -1})


def test_server_sent_events(server: Server, expected: dict[str, Any]) -> None:
    events = list(server.stream(BODY))
    texts = [event["text_output"] for event in events]
    assert len(texts) > 3
    assert texts[-1] == expected["text"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    check_figures(events[-1], expected)
    assert "acceptance_rate" not in events[0]


def test_grpc_stream(server: Server, expected: dict[str, Any]) -> None:
    with GrpcClient(server) as client:
        responses = list(client.stream({**BODY, "streaming": True}))
    assert len(responses) > 3
    assert responses[-1]["text_output"] == expected["text"]
    check_figures(responses[-1], expected)


def test_metrics_page(server: Server) -> None:
    names = ("dflash_draft_tokens", "dflash_accepted_draft_tokens", "dflash_output_tokens")
    before = [server.reading(name) for name in names]
    requests = server.reading("nv_inference_request_success")
    answer = server.generate(BODY)
    drafted, accepted, tokens = (start + answer[name] for start, name in zip(before, (
        "total_draft_tokens", "total_accepted_draft_tokens", "num_output_tokens"), strict=True))  # fmt: skip
    assert [server.reading(name) for name in names] == [drafted, accepted, tokens]
    assert server.reading("nv_inference_request_success") == requests + 1
