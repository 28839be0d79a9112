# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt estimate` as people and scripts call it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS
from tests.paths import FIXTURES, REPOSITORY

CONFIG = str(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml")


def test_json_document() -> None:
    result = run("estimate", CONFIG, "--tau", "4.7", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "dflash-trt/estimate/1"
    assert [curve["method"] for curve in document["curves"]] == ["none", "eagle3", "dflash"]
    for curve in document["curves"]:
        for entry in curve["points"]:
            assert entry["user_rate"]["low"] <= entry["user_rate"]["value"] <= entry["user_rate"]["high"]
    dflash = document["accounts"][2]
    assert dflash["point"]["tau"] == pytest.approx(4.7)
    assert {term["part"] for term in dflash["terms"]} == {"target", "drafter", "communication", "host"}


def test_tables_and_page(tmp_path: Path) -> None:
    page = tmp_path / "curve.html"
    result = run("estimate", CONFIG, "--tau", "4.7", "--html", str(page), "--routing", "uniform")
    assert result.returncode == 0, result.stderr
    assert "one step, DFlash: batch 1, 9 drafts, tau 4.70" in result.stdout
    assert "plain ends" in result.stdout
    begin = result.stdout.splitlines()[1:3]
    assert re.fullmatch(
        r"DFlash: one user gets [\d,]+ tokens/s .*x plain decoding; a GPU at most [\d,]+ tokens/s.", begin[0]
    )
    assert begin[1].startswith("Of 35 published speeds that were held out, 28 lay within 25 %")
    assert "28 of 35 held out" in (REPOSITORY / "docs" / "estimate.md").read_text()
    text = page.read_text()
    assert not re.search(r"(src|srcset|href)=\"(?!data:)|<script|@import|url\(", text)  # nothing is loaded
    assert "prefers-color-scheme: dark" in text
    assert text.count("data:image/svg+xml;base64,") == 2, "for wide and for narrow windows"
    assert "plain: 444.6 and 55.6 at 1" in text, "the picture in words"


@pytest.mark.parametrize(
    ("name", "is_cautious"),
    [("gpt-oss-20b.h100x1.latency", True), ("gpt-oss-20b.b200x1.latency", False), ("qwen3-8b.h200x1.latency", False)],
)
def test_what_is_known_to_be_predicted_too_high_is_said_first(name: str, is_cautious: bool) -> None:
    head = run("estimate", name, "--tau", "4").stdout.partition("throughput per GPU at")[0]
    assert ("TensorRT-LLM publishes 1.1 to 1.5 times less throughput" in head) == is_cautious


def test_picture(tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    assert run("estimate", CONFIG, "--tau", "4.7", "--plot", str(picture)).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_measured_routing(tmp_path: Path) -> None:
    counts = tmp_path / "routing.json"
    counts.write_text(json.dumps([1.0] * 8 + [0.0] * 120))
    result = run("estimate", CONFIG, "--tau", "4.7", "--routing", str(counts), "--json")
    assert json.loads(result.stdout)["accounts"][2]["experts_touched"] == pytest.approx(8, abs=0.1)


def test_a_config_json_is_enough_of_a_target(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "tiny-gpt-oss" / "config.json", tmp_path)
    arguments = ("--target", str(tmp_path), "--draft", str(FIXTURES / "tiny-gpt-oss-dflash"))
    result = run("estimate", CONFIG, "--tau", "2", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    target = json.loads(result.stdout)["system"]["target"]
    assert (target["num_experts"], target["top_k"], target["cache"]["num_full_layers"]) == (8, 2, 2)
    other = run("estimate", CONFIG, "--tau", "2", "--target", str(tmp_path))
    assert other.returncode == 1
    assert "expected a target of 36 layers, as z-lab/gpt-oss-120b-DFlash was made for, found 4" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "its card reports 3.7 (MT-Bench) to 5.4 (Math500) for 9 drafts"),
        (
            ["--tau", "4", "--acceptance", "x.json"],
            2,
            "give one of --acceptance VERIFY.json (from verify --json) and --tau X",
        ),
        (["--tau", "12"], 1, "tau: expected 1 to 10 for 9 drafts, found 12"),
        (["--tau", "4", "--routing", "skewed"], 1, "--routing: expected power-law, uniform or a JSON file"),
        (["--tau", "4", "--html", "no/such/place.html"], 2, "--html: expected a .html file in an existing directory"),
    ],
)
def test_refusals(arguments: list[str], code: int, words: str) -> None:
    result = run("estimate", CONFIG, *arguments)
    assert result.returncode == code
    assert words in re.sub(r"\s+", " ", result.stderr)


def test_requests_beyond_the_context_are_refused() -> None:
    result = run("estimate", CONFIG, "--tau", "4", "--prompt-tokens", "32768", "--output-tokens", "1")
    assert result.returncode == 1
    expected = "expected requests of at most max_seq_len 32768 tokens, found 32768 + 1"
    assert expected in " ".join(result.stderr.split())


def test_a_gpu_that_holds_no_request_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    facts = "target: openai/gpt-oss-120b\ndraft: z-lab/gpt-oss-120b-DFlash\ngpus: h100x1\npurpose: latency\n"
    facts += "max_seq_len: 131072\n"
    file.write_text(f"description: 65 GB of weights beside 10 GiB of reserves\n{facts}")
    result = run("estimate", str(file), "--tau", "4", "--prompt-tokens", "100000", "--output-tokens", "20000")
    assert result.returncode == 1
    assert "no memory for a single request of 120000 tokens" in " ".join(result.stderr.split())
