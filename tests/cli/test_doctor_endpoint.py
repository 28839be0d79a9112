# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor URL`: refusals, exit codes, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest

from dflash_trt.errors import ConfigError, EndpointError
from dflash_trt.observe.diagnosis.diagnosis import SCHEMA, Diagnosis
from dflash_trt.observe.diagnosis.judge import EndpointFinding, low_acceptance
from tests.cli.commands import run_here
from tests.observe.diagnosis.samples import group
from tests.observe.endpoints.canned import canned, models

Diagnosing = Callable[..., Diagnosis]


def diagnosis(*findings: EndpointFinding) -> Diagnosis:
    return Diagnosis(
        url="http://h", runtime="vllm", version="0.32.0", model="m", is_chat=True, acceptance="counters", seconds=61.4,
        groups=[group("short prompts"), group("thinking on", count=0)], speeds=[], findings=list(findings), notes=[],
    )  # fmt: skip


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Callable[[Diagnosis], None]:
    def install(found: Diagnosis) -> None:
        monkeypatch.setattr("dflash_trt.observe.diagnosis.diagnosis.diagnose", lambda client, **_: found)

    return install


def test_a_key_is_needed(tmp_path: Path) -> None:
    with canned({"/v1/models": (401, "no")}) as url:
        with pytest.raises(EndpointError, match="found 401") as caught:
            run_here("doctor", url)
        assert caught.value.hint == "give the server's key with --api-key-file"
        (tmp_path / "keys").write_text("# none\n")
        with pytest.raises(ConfigError, match="keys: no API key in it"):
            run_here("doctor", url, "--api-key-file", str(tmp_path / "keys"))


def test_a_server_that_refuses_every_request() -> None:
    pages = {"/v1/models": models("vllm"), "/v1/chat/completions": (503, "starting")}
    with canned(pages) as url, pytest.raises(EndpointError, match="found 503"):
        run_here("doctor", url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine"], "expected a URL as http://localhost:8000; ENGINE is for --ranks"),
        (["--no-load"], "--no-load is for a URL"),
        (["--ranks", "--baseline", "x"], "--baseline is for a URL"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        run_here("doctor", *arguments)


def test_a_healthy_server(result: Callable[[Diagnosis], None], capsys: pytest.CaptureFixture[str]) -> None:
    result(diagnosis())
    run_here("doctor", "http://h")
    output = capsys.readouterr().out
    assert output.startswith("m at http://h (vllm 0.32.0), 61 s")
    shares = " ".join(f"{share * 100:.0f}" for share in group("short prompts").shares_by_position)
    assert f"│ {shares} " in output
    assert "not asked" in output
    assert output.endswith("\nnothing is wrong\n")


def test_figures_of_others_are_told(result: Callable[[Diagnosis], None], capsys: pytest.CaptureFixture[str]) -> None:
    result(msgspec.structs.replace(diagnosis(), foreign_tokens=64))
    run_here("doctor", "http://h")
    assert "\n64 tokens of other clients are in these figures" in capsys.readouterr().out


def test_a_finding_is_exit_1_and_says_what_to_change(
    result: Callable[[Diagnosis], None], capsys: pytest.CaptureFixture[str]
) -> None:
    result(diagnosis(*low_acceptance("vllm", group("short prompts", 0.02), None, None)))
    with pytest.raises(EndpointError, match="http://h: acceptance near zero"):
        run_here("doctor", "http://h")
    output = capsys.readouterr().out
    assert "\nWRONG: acceptance near zero\n  tau of drafting passes 1.0" in output
    assert "likely causes, in this order:\n  1. K or V of the draft's context is scaled wrongly" in output
    assert "\n     see     https://github.com/vllm-project/vllm/issues/40727\n" in output
    assert '\n     change  "kv_cache_dtype": "auto" in --speculative-config' in output


def test_json_is_the_baseline_of_later_ones(
    result: Callable[[Diagnosis], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    healthy, file = diagnosis(), tmp_path / "healthy.json"
    result(healthy)
    run_here("doctor", "http://h", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == SCHEMA
    assert msgspec.convert(document, Diagnosis) == healthy
    file.write_text(json.dumps(document))
    run_here("doctor", "http://h", "--baseline", str(file))
    sick = low_acceptance("vllm", group("short prompts", 0.02), None, None)
    file.write_bytes(msgspec.json.encode(diagnosis(*sick)))
    with pytest.raises(ConfigError, match="expected the diagnosis of a healthy server, found: acceptance near zero"):
        run_here("doctor", "http://h", "--baseline", str(file))
    file.write_text(json.dumps(document | {"schema": "dflash-trt/verify/1"}))
    with pytest.raises(ConfigError, match=f"expected {SCHEMA}, found dflash-trt/verify/1"):
        run_here("doctor", "http://h", "--baseline", str(file))
