# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt try`: with our server, also in place of installed runtimes, and killed at any moment."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import click
import msgspec
import pytest
import yaml

from dflash_trt.api.paired_speed import Pair, Timing
from dflash_trt.cli.try_ import NAMES
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.errors import ConfigError, EndpointError, MissingDependencyError
from dflash_trt.observe.diagnosis.checks import EndpointFinding
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup
from dflash_trt.observe.servers.local_server import LocalServer, free_port
from dflash_trt.observe.trial.comparison import Comparison, picture, verdict
from tests.cli.commands import run, run_here
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.waiting import PATIENCE, until

MARK = "DFLASH_TRT_TRIAL"
# vLLM's or TensorRT-LLM's program as far as a trial uses it: serves ENGINE, plainly unless a draft is configured.
STAND_IN = """#!{python}
import os, pathlib, sys
words = sys.argv[1:]
assert words[0] in ("serve", {target!r}), words
port = words[words.index("--port") + 1]
text = " ".join(words)
if "--config" in words:
    text += pathlib.Path(words[words.index("--config") + 1]).read_text()
plain = [] if "speculative" in text else ["--draft-length", "0"]
command = [{python!r}, "-m", "dflash_trt", "serve", {engine!r}, "--port", port, "--target", {target!r},
           "--drain-seconds", "0", *plain]
os.execv(command[0], command)
"""


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one on PATH beside the system's, and the place to work in."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def deployment_file(**changes: object) -> Path:
    document = {
        "description": "the fixture pair", "target": str(FIXTURES / "tiny-gpt-oss"),
        "draft": str(FIXTURES / "tiny-gpt-oss-dflash"), "gpus": "h200x1", "purpose": "latency", "max_batch_size": 8,
    }  # fmt: skip
    file = Path("pair.yaml")
    file.write_text(yaml.safe_dump(document | changes))
    return file


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def marked(mark: str) -> list[str]:
    """Command lines of the processes that were started with this mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def await_none(mark: str) -> None:
    until(lambda: not marked(mark), lambda: marked(mark))


def diagnosis(*findings: EndpointFinding) -> Diagnosis:
    return Diagnosis(
        url="http://a", runtime="vllm", version=None, model="m", is_chat=True, acceptance="", seconds=1.0,
        groups=[], speeds=[], findings=list(findings), unmeasured=[], checks=[], notes=[],
    )  # fmt: skip


def comparison(
    ratio: float,
    *findings: EndpointFinding,
    texts: str = "a",
    is_in_turns: bool = True,
    cpu_seconds: float | None = None,
) -> Comparison:
    """Eight pairs of equal speed-up, 16 times; the last answers of DFlash have `texts`."""

    def answer(text: str, seconds: float) -> ProbeAnswer:
        return ProbeAnswer(prompt="one", text=text, output_tokens=10, seconds=seconds, tau_of_drafting_passes=3.0)

    pair = Pair(Timing(10, 1.0, cpu_seconds), Timing(10, 1 / ratio, cpu_seconds))
    dflash = [answer("a", 1 / ratio)] * 15 + [answer(texts, 1 / ratio)]
    return Comparison(
        pairs=[pair] * 16, plain=ProbeGroup(name="comparison", samples=[answer("a", 1.0)] * 16),
        dflash=ProbeGroup(name="comparison", samples=dflash), is_in_turns=is_in_turns, diagnosis=diagnosis(*findings),
    )  # fmt: skip


def test_verdicts() -> None:
    assert verdict(comparison(2.0), "m") == (
        "m: faster: 2.00x to 2.00x the speed of plain decoding (95 % interval, 16 pairs); acceptance length 3.00"
        " (tau of drafting passes); 16 of 16 answers equal; doctor finds nothing wrong"
    )
    plain, dflash = picture(comparison(2.0, cpu_seconds=0.25)).splitlines()
    assert (plain.count("█"), dflash.count("█")) == (20, 40)
    assert plain.endswith("10 tokens/s (16.0 s, 4.0 s of CPU)")
    assert verdict(comparison(0.5, texts="b"), "m").startswith("m: slower: 0.50x to 0.50x the speed of plain decoding")
    assert "15 of 16 answers equal" in verdict(comparison(0.5, texts="b"), "m")
    finding = EndpointFinding(name="acceptance is low", figure="", causes=[])
    assert verdict(comparison(2.0, finding), "m").endswith("; doctor finds acceptance is low")
    assert "one server after the other" in verdict(comparison(2.0, is_in_turns=False), "m")


def test_another_speculation_in_the_place_of_plain_decoding() -> None:
    """It may be slower than plain decoding, so that the acceptance length is no bound."""
    found = msgspec.structs.replace(comparison(3.03), against="mtp")
    assert verdict(found, "m").startswith("m: faster: 3.03x to 3.03x the speed of MTP (95 % interval")
    assert [line.split()[0] for line in picture(found).splitlines()] == ["MTP", "DFlash"]


def test_no_speed_above_the_acceptance_length() -> None:
    found = comparison(3.03)
    assert "this machine is too busy to tell" in verdict(found, "m")
    assert "faster" not in verdict(found, "m")
    assert picture(found) == ""


@pytest.mark.usefixtures("bare_path")
def test_nothing_is_installed() -> None:
    with pytest.raises(MissingDependencyError, match="needs vllm, which is not installed here") as error:
        run_here("try", str(deployment_file()), "--runtime", "vllm")
    assert error.value.hint == (
        "install one, or use its container: dflash-trt serve-config pair.yaml --runtime vllm -o FILE"
    )
    with pytest.raises(ConfigError, match="expected GPUs of this node, found gb10x2"):
        run_here("try", "gpt-oss-120b.gb10x2.latency")
    with pytest.raises(ConfigError, match="nowhere is neither an engine directory nor a deployment"):
        run_here("try", "nowhere")


def test_a_server_that_does_not_start_says_why(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    program(bare_path, "vllm", "#!/bin/sh\n(setsid sleep 600 &)\necho 'no GPU is here' >&2\nexit 3\n")
    with pytest.raises(EndpointError, match=r"(?s)vllm serve .* did not start: no GPU is here"):
        run_here("try", str(deployment_file()))
    assert [line for line in marked(mark) if "sleep" in line] == []


HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_awaited_at_its_health() -> None:
    def waiting(seconds: float, _: str) -> None:
        assert seconds < PATIENCE

    port = free_port()
    with LocalServer(words=[sys.executable, "-c", HEALTHY, str(port)], port=port).running(waiting) as server:
        assert server.url == f"http://127.0.0.1:{port}"


def test_a_draft_that_has_to_be_made_first(bare_path: Path) -> None:
    program(bare_path, "trtllm-serve", "#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="expected the draft here, found none") as error:
        run_here("try", "gpt-oss-20b.h100x1.latency", "--runtime", "trtllm")
    assert str(error.value.hint).startswith("dflash-trt quantize z-lab/gpt-oss-20b-DFlash --recipe bf16 -o")


def test_only_what_can_be_served_is_compared_with(bare_path: Path) -> None:
    program(bare_path, "vllm", "#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match=r"expected MTP layers, found none in .*tiny-gpt-oss"):
        run_here("try", str(deployment_file()), "--against", "mtp")
    with pytest.raises(ConfigError, match="missing key eagle3"):
        run_here("try", str(deployment_file()), "--against", "eagle3")
    with pytest.raises(click.UsageError, match="--against are for a deployment"):
        run_here("try", str(FIXTURES), "--against", "mtp")


def finds_what_it_should(done: subprocess.CompletedProcess[str]) -> bool:
    """Nothing wrong, or what holds for drafters that were trained on short texts."""
    return done.returncode == 0 or (done.returncode == 1 and "acceptance collapses at long contexts" in done.stderr)


@pytest.mark.full
def test_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    done = run("try", trained_engine("tiny-gpt-oss"), "--target", FIXTURES / "tiny-gpt-oss", "--json")
    document = json.loads(done.stdout)
    assert finds_what_it_should(done), done.stderr
    assert document["schema"] == "dflash-trt/try/1"
    assert document["verdict"] in ("faster", "slower", "as fast", "not known")
    assert len(document["plain"]["samples"]) == len(document["dflash"]["samples"]) == len(document["pairs"])
    assert document["plain"]["samples"][0]["text"] == document["dflash"]["samples"][0]["text"]
    assert all(sample["tau_of_drafting_passes"] > 1 for sample in document["dflash"]["samples"])
    assert "the plain server is stopped" in done.stderr
    assert len(marked(mark)) <= 1  # this process


@pytest.mark.full
@pytest.mark.parametrize(
    ("runtime", "name", "against"),
    [("vllm", "vllm", "none"), ("trtllm", "trtllm-serve", "none"), ("vllm", "vllm", "eagle3"),
     ("vllm", "vllm", "ngram")],
)  # fmt: skip
def test_a_deployment_in_an_installed_runtime(runtime: str, name: str, against: Method, bare_path: Path) -> None:
    target, engine = str(FIXTURES / "tiny-gpt-oss"), str(trained_engine("tiny-gpt-oss"))
    program(bare_path, name, STAND_IN.format(python=sys.executable, target=target, engine=engine))
    file = deployment_file(eagle3={"model": str(FIXTURES / "tiny-gpt-oss-dflash")})
    if runtime == "trtllm":
        run_here("quantize", FIXTURES / "tiny-gpt-oss-dflash", "--recipe", "bf16", "-o", "tiny-gpt-oss-dflash-bf16")
    done = run("try", file, "--runtime", runtime, "--against", against)
    assert finds_what_it_should(done), done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("pair.yaml: ")
    assert "one server after the other" in line
    assert f"{NAMES[against]} is stopped" in done.stderr
    equal = re.search(r"(\d+) of (\d+) answers equal", line)
    assert equal is not None
    assert equal[1] == equal[2]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_at_any_moment(number: signal.Signals) -> None:
    """Six moments between its start and its first answers."""
    chosen = random.Random(number)
    words = [sys.executable, "-m", "dflash_trt", "try", trained_engine("tiny-gpt-oss")]
    words += ["--target", FIXTURES / "tiny-gpt-oss"]
    # A negative code: before the command line has its handlers.
    expected = {signal.SIGINT: {130, -2}, signal.SIGTERM: {143, -15}, signal.SIGKILL: {-9}}[number]
    num_servers = 0
    for _ in range(6):
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            words, env=os.environ | {MARK: mark}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
        time.sleep(chosen.uniform(0.5, 20))
        num_servers += any("serve" in line for line in marked(mark))
        process.send_signal(number)
        assert process.wait(PATIENCE) in expected
        await_none(mark)
    assert num_servers > 0
