# SPDX-License-Identifier: Apache-2.0
"""`doctor URL`: findings from counts, of this server healthy and with one thing wrong, and of servers that are none.

Bounds of noise are worked out by hand. Hostile servers send a byte at a time, nothing, or what is no page: it ends, and
never with health. Without the deadline that takes minutes, because every byte that comes restarts a time-out.
"""

from __future__ import annotations

import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal, get_args

import msgspec
import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.llm import LLM
from dflash_trt.observe.diagnosis import prober, probes
from dflash_trt.observe.diagnosis.checks import EndpointFinding, cause_entries, causes
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis, diagnose
from dflash_trt.observe.diagnosis.judge_acceptance import low_acceptance
from dflash_trt.observe.diagnosis.judge_uses import (
    drafting_notes,
    long_contexts,
    lossless,
    prefix_hits,
    repeated_prefixes,
    sampled_acceptance,
    temperature,
)
from dflash_trt.observe.diagnosis.noise import is_first_compared, is_share_below, paired_loss, upper_bound
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup
from dflash_trt.observe.diagnosis.speed import Speed, slow_drafts
from dflash_trt.observe.endpoints import client as client_module
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import ServerKind
from tests.cli.commands import run_here
from tests.fixtures_data import without_template
from tests.loopback import Handler, listening
from tests.observe.diagnosis import faults
from tests.observe.diagnosis.samples import group
from tests.observe.endpoints.canned import models
from tests.runtime.server.live import serving
from tests.waiting import until


def test_bounds_by_hand() -> None:
    # mean 2.5, variance 5/3, error sqrt(5/12), t(3) = 12.92
    assert upper_bound([1, 2, 3, 4]) == pytest.approx(2.5 + 12.92 * math.sqrt(5 / 12))
    assert upper_bound([1, 1, 1]) == math.inf
    before = {"a": 2.0, "b": 1.0, "c": 3.0, "d": 2.0}
    after = {name: value * 0.9 for name, value in before.items()}
    # 2 * -0.1 / 1.9 for each: no scatter
    assert paired_loss(after, before, 0.05) == pytest.approx(0.1)
    assert paired_loss(after, before, 0.11) is None
    assert paired_loss(before, after, 0.05) is None
    assert paired_loss({"a": 0.0}, before, 0.05) is None
    # -.105 -.182 -.069 -.105: mean -.1155, error .0477 / 2, t(3) * error = .308: noise
    assert paired_loss({name: value - 0.2 for name, value in before.items()}, before, 0.05) is None
    # Figures measured with a prefix cache that loses features: the mean of plain differences scatters too much
    before = dict(zip("abcdefgh", (0.64, 0.52, 0.24, 0.39, 0.18, 0.21, 2.36, 0.64), strict=True))
    after = dict.fromkeys(before, 0.0) | {"g": 0.02}
    assert paired_loss(after, before, 0.05) == pytest.approx(1 - 0.02 / 5.18)
    assert paired_loss(dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0), 0.05) is None


def test_noise_is_no_finding() -> None:
    """At 99.95 % one of 2000 comparisons of equals would be expected."""
    generator = random.Random(0)
    found = 0
    for _ in range(1000):
        one, other = ([generator.gauss(2, 0.5) for _ in range(12)] for _ in range(2))
        names = [str(index) for index in range(12)]
        found += paired_loss(dict(zip(names, one, strict=True)), dict(zip(names, other, strict=True)), 0) is not None
    assert found <= 3


def test_share_below() -> None:
    reference = [1.5, 1.6, 1.4, 1.5, 1.6, 1.4]
    assert is_share_below([0.05, 0.06, 0.04, 0.05], reference, 0.2)
    assert not is_share_below([0.28, 0.3, 0.26, 0.29], reference, 0.2)
    assert not is_share_below([0.0, 0.1, 0.5, 0.0], reference, 0.2)  # below on average, and too noisy to say so
    assert not is_share_below([0.0, 0.0, 0.0], reference, 0.2)
    assert not is_first_compared(group("a"), group("b"))
    assert is_first_compared(group("a"), group("b", draft_length=3))


OURS: ServerKind = "dflash-trt"


def said(findings: list[EndpointFinding]) -> list[tuple[str, str]]:
    """Name and likeliest cause of each."""
    return [(finding.name, finding.causes[0].name) for finding in findings]


@pytest.mark.parametrize(("factor", "likeliest"), [(0.85, "k_norm"), (0.6, "taps"), (0.25, "scales")])
def test_below_the_baseline_the_loss_orders_the_causes(factor: float, likeliest: str) -> None:
    findings = low_acceptance(OURS, group("short", factor), group("short"), None)
    assert said(findings) == [("acceptance below the baseline", likeliest)]
    assert {"k_norm", "taps", "scales"} <= {cause.name for cause in findings[0].causes}
    assert "16 of 16 answers are the same" in findings[0].figure
    other = low_acceptance(OURS, group("short", 0.6, text="other"), group("short"), None)
    assert said(other) == [("acceptance below the baseline", "template")]


def test_below_what_was_expected_or_is_sampled() -> None:
    short = group("short", 0.6)
    assert said(low_acceptance(OURS, short, None, 2.93)) == [("acceptance below what was expected", "taps")]
    assert low_acceptance(OURS, short, None, short.tau_of_drafting_passes) == []
    found = sampled_acceptance("vllm", group("one", 0.1, count=6), group("one", count=6))
    assert said(found) == [("acceptance when sampling below the baseline", "independent")]
    assert sampled_acceptance("vllm", group("one", 0.1, count=6), None) == []


def test_windows_that_are_ignored_and_features_that_a_prefix_cache_loses() -> None:
    findings = long_contexts(OURS, group("short"), group("long", 0.5, count=8), group("long", 0.9, count=8))
    assert said(findings) == [("acceptance at long contexts below the baseline", "window")]
    again = group("again", 0.3, count=8, cached_tokens=448)
    (finding,) = repeated_prefixes("tensorrt-llm", group("first", count=8), again)
    assert finding.causes[0].name == "prefix"
    assert "context_recompute_tail" in finding.causes[0].setting
    assert "3584 of its tokens came from the cache" in finding.figure


def test_texts_that_are_the_same_at_temperature_1_or_differ_at_0() -> None:
    one, other = group("one", count=6), group("two", count=6)
    assert temperature(OURS, one, ProbeGroup(name="two", samples=other.samples[:3])) == []
    differs = ProbeGroup(name="two", samples=[*other.samples[:5], *group("x", text="x", count=6).samples[5:]])
    assert temperature(OURS, one, differs) == []
    short = msgspec.structs.replace(other.samples[0], output_tokens=3)  # too few to be another by chance
    assert temperature(OURS, one, ProbeGroup(name="two", samples=[short, *other.samples[1:]])) == []
    (finding,) = lossless(OURS, group("short"), group("plain", text="other", count=6))
    assert finding.figure == "6 of 6 greedy answers differ from plain decoding's"


@pytest.mark.parametrize(("kind", "hits", "found"), [("vllm", 0, 1), ("vllm", 64, 0), ("vllm", None, 0)])
def test_a_prefix_cache_without_hits(kind: ServerKind, hits: int | None, found: int) -> None:
    assert len(prefix_hits(kind, group("again", count=8), hits)) == found


def test_slower_than_plain_decoding() -> None:
    def speeds(*drafted: float) -> list[Speed]:
        rates = {None: list(drafted), 0: [100.0, 110.0, 105.0, 100.0, 105.0], 1: [120.0, 125.0, 118.0, 120.0, 120.0]}
        return [Speed(concurrency=16, draft_length=k, tokens_per_second=rate) for k, rate in rates.items()]

    (finding,) = slow_drafts(OURS, speeds(50.0, 55.0, 53.0, 49.0, 53.0))
    assert finding.figure == "16 at a time: 52 tokens/s with drafts, 104 without; best with a draft length of 1"
    assert slow_drafts(OURS, speeds(50.0, 25.0, 80.0, 20.0, 60.0)) == []  # a busy machine
    assert slow_drafts(OURS, speeds(99.0, 108.0, 103.0, 99.0, 104.0)) == []
    assert said(slow_drafts(OURS, speeds(90.0, 99.0, 95.0, 90.0, 95.0))) == [("slower than plain decoding", "batch")]
    assert slow_drafts(OURS, speeds(50.0, 55.0, 53.0)) == []
    assert slow_drafts("vllm", speeds(50.0, 55.0, 53.0, 49.0, 53.0)[:1]) == []


def test_what_is_worth_knowing() -> None:
    short, drawn = group("short"), group("one", 0.05, count=6)
    thinking = group("thinking on", count=6), group("thinking off", 0.1, count=6)
    names = [finding.name for finding in drafting_notes(OURS, short, drawn, group("languages", 0.2, count=6), thinking)]
    assert names == [
        "other languages are drafted worse", "few drafts are accepted when sampling", "drafted worse with thinking off",
        "drafts that seldom pay",
    ]  # fmt: skip
    shorter = group("short", draft_length=3)  # late positions were not always drafted: nothing to say about them
    assert drafting_notes(OURS, shorter, shorter, shorter, (shorter, shorter)) == []


@pytest.mark.parametrize("kind", get_args(ServerKind))
def test_every_cause_has_a_source_and_a_setting(kind: ServerKind) -> None:
    for cause in causes(kind, *cause_entries()):
        assert cause.source.startswith("https://")
        assert cause.what
        assert cause.setting


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.engine(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def baseline(engine: Path) -> Diagnosis:
    return ask(engine)


def ask(
    engine: Path, plant: Callable[[LLM], None] | None = None, baseline: Diagnosis | None = None, *,
    draft_length: int | Literal["auto"] = 7,
) -> Diagnosis:  # fmt: skip
    """Without the probe that measures time: tests share their machine.

    In completions, of which the draft was trained, not in chats.
    """
    with TemporaryDirectory() as folder:
        target = without_template(faults.TARGET.name, Path(folder))
        # Steps are compared, and `auto` makes those depend on time.
        with LLM(engine, target, max_batch_size=16, draft_length=draft_length) as llm:
            return _asked(llm, plant, baseline)


def _asked(llm: LLM, plant: Callable[[LLM], None] | None, baseline: Diagnosis | None) -> Diagnosis:
    if plant is not None:
        plant(llm)
    with serving(llm) as live, Client(live.url) as client:
        return diagnose(client, baseline=baseline, long_tokens=1024, has_load=False, seconds=1000)


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    assert {finding.name for finding in diagnosis.unmeasured} <= {"acceptance not judged"}  # no baseline, no speeds
    return [(finding.name, finding.causes[0].name) for finding in diagnosis.findings]


@pytest.mark.full
def test_a_healthy_server_has_no_findings(engine: Path, baseline: Diagnosis) -> None:
    assert found(baseline) == []
    again = ask(engine, baseline=baseline)
    assert found(again) == []
    assert [len(group.samples) for group in again.groups] == [16, 6, 6, 6, 8, 8, 8, 6, 6, 0, 0]


@pytest.mark.full
def test_window_ignored(tmp_path: Path, baseline: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    # Passages are of this package's source, and change with it: of 8, two that accept a third of a draft hide the rest.
    monkeypatch.setattr(probes, "NUM_LONG", 24)
    sick = faults.engine(tmp_path, window=None)
    diagnosis = ask(sick, baseline=baseline)
    assert found(diagnosis) == [("acceptance collapses at long contexts", "window")]
    short, long = diagnosis.groups[0], diagnosis.groups[6]
    assert long_contexts("dflash-trt", short, long, None) == diagnosis.findings  # the baseline was not needed


@pytest.mark.full
def test_first_k_norm_for_all_layers(tmp_path: Path, baseline: Diagnosis) -> None:
    sick = faults.engine(tmp_path, edit=faults.first_k_norm_for_all)
    assert found(ask(sick, baseline=baseline)) == [("acceptance below the baseline", "k_norm")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("cause", "fault"),
    [
        ("layout", {"sample_from_anchor": True}),
        ("pairing", {"is_neox_style": False}),
        ("projections", {"edit": faults.misread_projections}),
        ("pair", {"edit": faults.fc_of_another_target}),
    ],
)
def test_a_draft_that_is_misread(cause: str, fault: dict[str, Any], tmp_path: Path, baseline: Diagnosis) -> None:
    """The injected fault is among the causes, also without a baseline if acceptance is low enough."""
    diagnosis = ask(faults.engine(tmp_path, **fault), baseline=baseline)
    (finding,) = diagnosis.findings
    assert finding.name.startswith("acceptance ")
    assert cause in {each.name for each in finding.causes}
    alone = low_acceptance("dflash-trt", diagnosis.groups[0], None, None)
    assert all(cause in {each.name for each in found.causes} for found in alone)


@pytest.mark.full
def test_a_policy_that_stops_drafting_hides_no_fault(tmp_path: Path) -> None:
    sick = faults.engine(tmp_path, window=None, edit=faults.reverse_fc)
    diagnosis = ask(sick, draft_length="auto")
    assert [name for name, _ in found(diagnosis)] == ["acceptance low"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (faults.shift_taps, ("acceptance below the baseline", "taps")),
        (faults.scale_v, ("acceptance below the baseline", "scales")),
        (faults.lose_prefix_features, ("acceptance falls on a repeated prefix", "prefix")),
        (faults.ignore_temperature, ("temperature ignored", "temperature")),
    ],
)
def test_planted(plant: Callable[[LLM], None], expected: tuple[str, str], engine: Path, baseline: Diagnosis) -> None:
    assert found(ask(engine, plant, baseline)) == [expected]


BYTE_SECONDS = 0.2
ANSWER = (
    b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}],'
    b' "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)
PAGES = {
    "/v1/models": models("vllm").encode(), "/version": b'{"version": "0.33.0"}', "/v1/chat/completions": ANSWER,
    "/metrics": b"vllm:num_requests_running 0\n",
}  # fmt: skip


@contextmanager
def hostile(
    *, slow_path: str = "", slow_part: str = "body", pages: dict[str, bytes] | None = None,
    on_slow: Callable[[], None] = lambda: None,
) -> Iterator[str]:  # fmt: skip
    """A server whose `slow_path` sends a byte every BYTE_SECONDS, and calls `on_slow` before."""
    over = threading.Event()

    class Hostile(Handler):
        wbufsize = 0

        def get(self) -> None:
            self.body()
            if is_slow := self.path == slow_path:
                on_slow()
            content = (PAGES | (pages or {})).get(self.path, b"") + b" " * 2000 * is_slow
            fields = f"content-length: {len(content)}\r\nconnection: close\r\nx: {'y' * 2000}"
            head = f"HTTP/1.1 200 OK\r\n{fields}\r\n\r\n".encode()
            self._send(head, is_slow=is_slow and slow_part == "header")
            self._send(content, is_slow=is_slow)

        def _send(self, data: bytes, *, is_slow: bool) -> None:
            try:
                for index in range(len(data) if is_slow else 1):
                    self.wfile.write(data[index : index + 1] if is_slow else data)
                    if is_slow and over.wait(BYTE_SECONDS):
                        return
            except OSError:  # the client has cut the connection
                self.close_connection = True

    with listening(Hostile) as url:
        try:
            yield url
        finally:
            over.set()


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("dflash_trt.cli.doctor"), "GRACE_SECONDS", 0.2)  # cli.doctor is the command


@pytest.mark.parametrize(("slow_path", "slow_part"), [("/v1/models", "header"), ("/v1/chat/completions", "body")])
def test_a_byte_at_a_time_ends_with_the_time_for_all(slow_path: str, slow_part: str) -> None:
    with (
        hostile(slow_path=slow_path, slow_part=slow_part) as url,
        pytest.raises(EndpointError, match="no answer before the time was up"),
    ):
        run_here("doctor", url, "--seconds", "1")


def test_silent_servers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EndpointError, match="no answer before the time was up"):
            run_here("doctor", url, "--seconds", "1")


def test_slow_metrics(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time runs from when they are asked for: what comes before takes long on a busy machine."""
    begun: list[float] = []

    class LateTimer(threading.Timer):
        def run(self) -> None:
            until(lambda: begun)
            super().run()

    clock = {"monotonic": lambda: time.monotonic() - begun[0] if begun else 0.0, "perf_counter": time.perf_counter}
    for module in (client_module, prober):
        monkeypatch.setattr(module, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(client_module, "threading", SimpleNamespace(Timer=LateTimer))
    with (
        hostile(slow_path="/metrics", on_slow=lambda: begun.append(time.monotonic())) as url,
        pytest.raises(EndpointError, match="too few answers"),
    ):
        run_here("doctor", url, "--seconds", "1")
    assert "nothing wrong in 0 of 6 checks" in capsys.readouterr().out


@pytest.mark.parametrize("page", [b"<html>no</html>", b"vllm:x \xff\xfe\n"])
def test_metrics_that_are_no_page_are_a_finding(page: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(pages={"/metrics": page}) as url, pytest.raises(EndpointError, match="metrics cannot be read"):
        run_here("doctor", url, "--no-load")
    output = capsys.readouterr().out
    assert "NOT MEASURED: metrics cannot be read\n  its metrics cannot be read: " in output
    assert "the metrics are not in Prometheus's text format" in output
    assert "nothing wrong in 0 of 6 checks" in output
