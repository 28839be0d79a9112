# SPDX-License-Identifier: Apache-2.0
"""Windows out of Prometheus: the answers of one, and a real one that scraped servers of each runtime."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.traffic.window import scraped_kind
from tests.cli.commands import run
from tests.loopback import Handler, listening
from tests.observe.endpoints.canned import canned
from tests.observe.traffic.pages import Engine, page
from tests.waiting import until

SECONDS = 12
"""Window of the real Prometheus."""


@contextmanager
def prometheus(now: str, earlier: str) -> Iterator[str]:
    """Answers instant queries with the samples of two pages, as far as they have the metric."""

    class Prometheus(Handler):
        def get(self) -> None:
            query = parse_qs(urlsplit(self.path).query).get("query", [""])[0]
            name = re.split(r"[({\[]", query.removeprefix("increase(").removeprefix("avg_over_time("))[0]
            text = earlier if " offset 1d" in query else now
            result = [
                {"metric": dict(re.findall(r'(\w+)="([^"]*)"', labels)), "value": [1.5e9, value]}
                for labels, value in re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
            ]
            self.answer(
                200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
            )

    with listening(Prometheus) as url:
        yield url


INSTANCES = ('instance="a"', 'instance="b"')


def test_today_against_yesterday() -> None:
    """One of two pods lost its draft overnight."""
    yesterday = page("vllm", Engine(), Engine(), labels=INSTANCES)
    today = page("vllm", Engine(), Engine(rates=()), labels=INSTANCES)
    with prometheus(today, yesterday) as url:
        done = run("doctor", "--prometheus", url, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert [finding["name"] for finding in document["findings"]] == ["an engine decodes without drafts"]
    assert [engine["engine"] for engine in document["now"]["engines"]] == ["a 0", "b 1"]
    with prometheus(yesterday, yesterday) as url:
        assert run("doctor", "--prometheus", url).returncode == 0


def test_nothing_scraped_and_no_prometheus() -> None:
    with prometheus("", "") as url, Client(url) as client, pytest.raises(EndpointError, match="no series of vllm:"):
        scraped_kind(client, "")
    both = page("vllm", Engine()) + page("sglang", Engine())
    with prometheus(both, both) as url, Client(url) as client, pytest.raises(EndpointError, match="several runtimes"):
        scraped_kind(client, "")
    with canned({}) as url:
        assert "is no Prometheus server" in run("doctor", "--prometheus", url).stderr
    answers = ("[]", '{"data": {"resultType": "matrix", "result": [{"metric": {}, "values": []}]}}', '{"data": 1}')
    for text in answers:

        class Odd(Handler):
            def get(self) -> None:
                self.answer(200, text.encode())  # noqa: B023  # asked within the loop

        with listening(Odd) as url:
            assert "/api/v1/query: expected a vector, found" in run("doctor", "--prometheus", url).stderr


@pytest.mark.parametrize("words", [("--window", "1y"), ("--against", "0d"), ("--passive",), ("--long-tokens", 600)])
def test_options_that_do_not_fit(words: tuple[object, ...]) -> None:
    assert run("doctor", "--prometheus", "http://127.0.0.1:9", *words).returncode == 2


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus")
def test_a_real_prometheus(tmp_path: Path) -> None:
    """It scrapes three servers; one accepts less in the second window."""
    began = time.monotonic()

    def counts(kind: str) -> str:
        seconds = time.monotonic() - began
        good, late = min(seconds, SECONDS + 4), max(0.0, seconds - SECONDS - 4)
        engine = Engine(
            passes=round(500 * (good + late)), prefix_queries=round(9000 * seconds), prefix_hits=round(4000 * good)
        )
        return page(kind, engine)

    with ExitStack() as stack:
        jobs = {
            kind: stack.enter_context(canned({"/metrics": lambda kind=kind: counts(kind)}))  # type: ignore[misc]
            for kind in ("vllm", "sglang")
        }
        scrapes = [
            {"job_name": kind, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
            for kind, url in jobs.items()
        ]
        (tmp_path / "prometheus.yml").write_text(
            json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": scrapes})
        )
        url = stack.enter_context(_running(tmp_path))
        time.sleep(2 * SECONDS + 8)
        window = ("--window", f"{SECONDS}s", "--against", f"{SECONDS + 4}s")
        results = {
            kind: run("doctor", "--prometheus", url, "--match", f'job="{kind}"', *window, "--json") for kind in jobs
        }
    for kind, done in results.items():
        document = json.loads(done.stdout)
        assert document["runtime"] == kind
        assert [finding["name"] for finding in document["findings"]] == ["prefix hits fell to zero"], done.stdout
        assert document["now"]["engines"][0]["drafting_passes"] == pytest.approx(500 * SECONDS, rel=0.3)


@contextmanager
def _running(directory: Path) -> Iterator[str]:
    command = [
        "prometheus",
        "--config.file",
        str(directory / "prometheus.yml"),
        "--storage.tsdb.path",
        str(directory / "data"),
    ]
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--web.listen-address", "127.0.0.1:0"], stderr=output, stdout=output)
        try:
            until(
                lambda: process.poll() is not None or re.search(r"address=127\.0\.0\.1:[1-9]", log.read_text()),
                log.read_text,
            )
            port = re.search(r"address=127\.0\.0\.1:([1-9]\d*)", log.read_text())
            assert port, log.read_text()
            url = f"http://127.0.0.1:{port[1]}"
            until(lambda: httpx2.get(f"{url}/-/ready").status_code == 200)
            yield url
        finally:
            process.kill()
            process.wait()
